"""``hetconv doctor``: devices, versions, and which backends connect which devices."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hetconv.autotune.launch.probe import Outcome, try_pair
from hetconv.autotune.launch.progress import Reporter
from hetconv.autotune.measure import device_info
from hetconv.runtime.local_rank import check_devices
from hetconv.runtime.rank_devices import cpu_model, device_identity
from hetconv.runtime.throttle import DeviceName

Try = Callable[[tuple[str, str], str, float], Outcome]
SHARING = (
    "NCCL joins two ranks of one GPU only from version 2.30 on, and with "
    "NCCL_MULTI_RANK_GPU_ENABLE=1"
)


@dataclass(frozen=True)
class Found:
    """A device that is present."""

    device: str
    name: str
    unit: str
    memory_bytes: int


@dataclass(frozen=True)
class Pair:
    """Two ranks and the outcome of each backend.

    Attributes:
        devices: devices of the two ranks.
        shared: whether both ranks are on one device.
        outcomes: by backend.
    """

    devices: tuple[str, str]
    shared: bool
    outcomes: dict[str, Outcome]

    @property
    def working(self) -> list[str]:
        """Returns the backends that work."""
        return [
            backend
            for backend, outcome in self.outcomes.items()
            if outcome.problem is None
        ]


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        host: name of the host.
        cpu: name of the CPU.
        cores: number of cores that this process may use.
        versions: of what is installed.
        devices: what was examined.
        pairs: every pair of devices.
    """

    host: str
    cpu: str
    cores: int
    versions: dict[str, str]
    devices: tuple[Found, ...]
    pairs: tuple[Pair, ...]

    @property
    def healthy(self) -> bool:
        """Whether every pair has a backend that works."""
        return all(pair.working for pair in self.pairs)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a JSON document."""
        return asdict(self) | {"healthy": self.healthy}


def visible() -> list[DeviceName]:
    """Returns the CPU and all GPUs; the CPU twice where it is alone."""
    gpus = [DeviceName(f"cuda:{i}") for i in range(torch.cuda.device_count())]
    return [DeviceName("cpu"), *(gpus or [DeviceName("cpu")])]


def examine(devices: Sequence[DeviceName], timeout: float) -> Report:
    """Examines devices and tries all pairs.

    Args:
        devices: one per rank.
        timeout: seconds that each operation of a pair may take.

    Raises:
        HetConvError: a device is not present.
    """
    check_devices(devices)
    found = tuple(map(_found, devices))
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    with Reporter("doctor") as say:
        say.stage("tries", sum(len(backends(a, b)) for a, b in combinations(found, 2)))

        def attempt(names: tuple[str, str], backend: str, timeout: float) -> Outcome:
            outcome = try_pair(names, backend, timeout)
            say.advance(f"{' - '.join(names)}, {backend}: {outcome.problem or 'works'}")
            return outcome

        pairs = try_pairs(found, timeout, attempt)
    return Report(platform.node(), cpu_model(), cores, _versions(), found, pairs)


def try_pairs(
    devices: Sequence[Found], timeout: float, attempt: Try = try_pair
) -> tuple[Pair, ...]:
    """Tries every pair of devices with each of its backends.

    Args:
        devices: one per rank.
        timeout: seconds that each operation may take.
        attempt: tries one pair with one backend.
    """
    pairs = []
    for a, b in combinations(devices, 2):
        names = (a.device, b.device)
        outcomes = {
            backend: attempt(names, backend, timeout) for backend in backends(a, b)
        }
        pairs.append(Pair(names, a.unit == b.unit, outcomes))
    return tuple(pairs)


def backends(a: Found, b: Found) -> tuple[str, ...]:
    """Returns the backends that may connect two devices: gloo, and NCCL between GPUs."""
    gpus = all(torch.device(found.device).type == "cuda" for found in (a, b))
    return ("gloo", "nccl") if gpus else ("gloo",)


def _found(name: DeviceName) -> Found:
    device = torch.device(name.device)
    if device.type == "cpu":
        return Found("cpu", cpu_model(), "cpu", device_info.memory_bytes(device))
    device = torch.device("cuda", device.index or 0)
    which = device_identity(device)
    return Found(
        str(device), which.hardware, which.unit, device_info.memory_bytes(device)
    )


def _versions() -> dict[str, str]:
    """Of what is there."""
    nccl = (
        torch.cuda.nccl.version()
        if torch.cuda.is_available() and dist.is_nccl_available()
        else ()
    )
    found = {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "",
        "driver": device_info.driver(),
        "triton": device_info.triton_version(),
        "NCCL": ".".join(map(str, nccl)),
        "Python": platform.python_version(),
    }
    return {what: version for what, version in found.items() if version}


def show_report(report: Report, console: Console) -> None:
    """Prints devices, the pairs by backend, and a line for each problem."""
    console.print(
        f"[bold]{report.host}[/bold], {report.cpu}, {report.cores} cores",
        highlight=False,
    )
    console.print(
        ", ".join(f"{what} {version}" for what, version in report.versions.items()),
        highlight=False,
    )
    table = Table(
        "device",
        "name",
        "memory",
        "unit",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    for d in dict.fromkeys(report.devices):
        table.add_row(d.device, d.name, f"{d.memory_bytes / 1e9:.0f} GB", d.unit)
    console.print(table)
    table = Table(
        "pair", "gloo", "nccl", "", box=None, header_style="bold", pad_edge=False
    )
    for pair in report.pairs:
        cells = (_cell(pair.outcomes.get(backend)) for backend in ("gloo", "nccl"))
        table.add_row(
            " - ".join(pair.devices), *cells, "one device" if pair.shared else ""
        )
    console.print(table)
    for pair in report.pairs:
        for line in advice(pair):
            console.print(line, highlight=False, markup=False)
    console.print(
        "every pair has a backend that works"
        if report.healthy
        else "not every pair has a backend that works"
    )


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    return (
        f"works, {outcome.seconds:.1f} s"
        if outcome.problem is None
        else "[bold red]no[/bold red]"
    )


def advice(pair: Pair) -> list[str]:
    """Returns lines that say what does not work between two ranks, and what to do."""
    between = " - ".join(pair.devices)
    lines = [
        f"{between}: {name} {o.problem}"
        for name, o in pair.outcomes.items()
        if o.problem is not None
    ]
    if pair.shared and "nccl" in pair.outcomes:
        lines.append(
            f"{between}: both ranks are on one GPU, whose time and memory they share; {SHARING}"
        )
    if lines and pair.working == ["gloo"]:
        lines.append(
            f'{between}: gloo works; use torch.distributed.init_process_group("gloo")'
        )
    if not pair.working:
        lines.append(f"{between}: nothing joins them; leave one out of --devices")
    return lines
