"""The machine of a measurement: its device, versions and commit, and a rival on its core."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hetconv.errors import KernelError, OutputError
from hetconv.schemas.output_file import check_output, write

ROOT = Path(__file__).resolve().parents[2]
# It computes until the process that started it is gone.
RIVAL = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
RESULTS = ROOT / "bench" / "results"


def need_cuda(bench: str) -> torch.device:
    """The GPU to measure. Raises `KernelError` without one."""
    if not torch.cuda.is_available():
        raise KernelError(
            f"bench {bench} needs a CUDA device, and torch {torch.__version__} sees none on "
            "this machine"
        )
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def facts() -> dict[str, Any]:
    """Of this process's CUDA device and the software."""
    import triton

    p = torch.cuda.get_device_properties(0)
    return {
        "device": p.name,
        "capability": f"{p.major}.{p.minor}",
        "sms": p.multi_processor_count,
        "l2_bytes": p.L2_cache_size,
        "memory_bytes": p.total_memory,
        "driver": _said(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "date": now(),
        **commit(),
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> dict[str, Any]:
    """From git, or from HETCONV_COMMIT, for a copy of the tree whose history is another."""
    given = os.environ.get("HETCONV_COMMIT")
    found = _said("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if given is not None or found is None:
        return {"commit": given, "dirty": None}
    return {
        "commit": found,
        "dirty": bool(_said("git", "-C", str(ROOT), "status", "--porcelain")),
    }


def software() -> dict[str, Any]:
    """Of a measurement on CPUs, which nothing else identifies."""
    return {
        "machine": platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def output_path(text: str) -> Path:
    """Parses the name of a file to write; argparse refuses one that cannot be written."""
    try:
        return check_output(text)
    except OutputError as e:
        raise ArgumentTypeError(str(e)) from e


def add_output_argument(
    parser: ArgumentParser, line: str = "also write the results here"
) -> None:
    """Adds the option for the file of results."""
    parser.add_argument("-o", "--output", type=output_path, metavar="FILE", help=line)


def save(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a result file, with its folders."""
    write(path, (json.dumps(document, indent=1) + "\n").encode())


def slug(device: str) -> str:
    """A device's name as a folder's: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def results_file(folder: Path, suite: str) -> Path:
    """The one file of a suite in a machine's folder; it is replaced when the suite is
    measured anew.
    """
    return folder / f"{suite}.json"


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


@contextmanager
def beside_a_busy_process(wanted: bool) -> Iterator[None]:
    """Binds this process to one core, the last, with a process that never rests;
    another device for real.
    """
    if not wanted:
        yield
        return
    before = os.sched_getaffinity(0)
    core = {max(before)}
    os.sched_setaffinity(0, core)
    rival = subprocess.Popen([sys.executable, "-c", RIVAL])
    os.sched_setaffinity(rival.pid, core)
    try:
        yield
    finally:
        rival.kill()
        rival.wait()
        os.sched_setaffinity(0, before)
