"""The preflight: pairs of ranks that work, fail, die and hang, and what is said of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch.distributed as dist
from rich.console import Console

from hetconv.autotune.cli import doctor
from hetconv.autotune.cli.doctor import (
    Found,
    Pair,
    Report,
    advice,
    examine,
    show_report,
    try_pairs,
)
from hetconv.autotune.launch.probe import Outcome, communicate, main_reason, try_pair
from hetconv.autotune.launch.supervisor import log_last_action
from hetconv.errors import HetConvError
from hetconv.runtime.throttle import DeviceName
from tests import ROOT

CPUS = ("cpu", "cpu")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return (
        "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    )


def fails(rank: int, device: str) -> None:
    log_last_action("all_reduce")
    if rank == 1:
        raise RuntimeError(f"no telex on {device}\nlook elsewhere")
    time.sleep(60)


def dies(rank: int, device: str) -> None:
    log_last_action("all_reduce")
    if rank == 1:
        print("cannot go on", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hangs(folder: Path, rank: int, device: str) -> None:
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    log_last_action("barrier")
    # A kernel that waits for another GPU does not heed the signal either.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def lies(rank: int, device: str) -> None:
    """Adds nothing up, and says that it has."""
    dist.all_reduce = lambda tensor: None
    communicate(rank, device)


def test_two_ranks_communicate_over_gloo() -> None:
    outcome = try_pair(CPUS, "gloo", 30)
    assert outcome.problem is None
    assert outcome.seconds > 0


def test_a_backend_that_is_not_there_fails_with_its_reason() -> None:
    problem = try_pair(CPUS, "nccl", 30).problem
    assert problem is not None
    assert problem.startswith("fails in ")


def test_a_backend_that_raises_is_named_with_the_operation_and_the_reason() -> None:
    outcome = try_pair(CPUS, "gloo", 50, fails)
    assert outcome.problem == "fails in all_reduce: RuntimeError: no telex on cpu"


def test_a_rank_that_dies_is_named_with_its_last_words() -> None:
    problem = try_pair(CPUS, "gloo", 30, dies).problem
    assert problem == "fails in all_reduce: rank 1 died; last output: cannot go on"


def test_a_wrong_sum_is_a_failure() -> None:
    problem = try_pair(CPUS, "gloo", 30, lies).problem
    assert problem in [
        f"fails in all_reduce: RuntimeError: gave {n}.0 where 3.0 was expected"
        for n in (1, 2)
    ]


def test_a_pair_that_hangs_is_ended_in_time_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    outcome = try_pair(CPUS, "gloo", 1, partial(hangs, tmp_path))
    assert outcome.problem == "hangs in barrier: no answer for 1 s"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["pid0", "pid1"]
    assert not any(alive(int(path.read_text())) for path in tmp_path.iterdir())


ORPHANS = """
from functools import partial
from pathlib import Path
from hetconv.autotune.launch.probe import try_pair
from tests.cli.test_doctor import hangs
if __name__ == "__main__":
    try_pair(("cpu", "cpu"), "gloo", 50, partial(hangs, Path({folder!r})))
"""


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    (tmp_path / "run.py").write_text(ORPHANS.format(folder=str(tmp_path / "pids")))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "run.py")], env=env)
    pids: list[str] = []
    while len(pids) < 2 or not all(pids):
        assert parent.poll() is None
        time.sleep(0.1)
        pids = [path.read_text() for path in (tmp_path / "pids").iterdir()]
    parent.kill()
    parent.wait()
    while any(alive(int(pid)) for pid in pids):  # the test's timeout is the limit
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "NCCL error in: x.cpp:1\nncclInvalidUsage: y\nLast error:\nDuplicate GPU detected",
            "Duplicate GPU detected",
        ),
        (
            "CUDA error: invalid device ordinal\nFor debugging consider ...",
            "CUDA error: invalid device ordinal",
        ),
        ("\n  odd\n", "odd"),
    ],
)
def test_the_line_that_says_most_is_the_reason(message: str, said: str) -> None:
    error = f"torch.distributed.RuntimeError: {message}"
    assert main_reason(error) == f"RuntimeError: {said}"
    assert main_reason("KeyboardInterrupt") == "KeyboardInterrupt"


CPU, ONE, TWO = (
    Found("cpu", "EPYC", "cpu", 16 * 10**9),
    Found("cuda:0", "A100", "GPU-0", 8 * 10**10),
    Found("cuda:1", "T4", "GPU-1", 16 * 10**9),
)
WORKS, HANGS = (
    Outcome(None, 0.5),
    Outcome("hangs in all_reduce: no answer for 10 s", 12.0),
)


def nccl_hangs(devices: tuple[str, str], backend: str, timeout: float) -> Outcome:
    assert timeout == 10
    return HANGS if backend == "nccl" else WORKS


def test_each_pair_is_tried_with_gloo_and_two_gpus_with_nccl_too() -> None:
    pairs = try_pairs((CPU, ONE, TWO, ONE), 10, nccl_hangs)
    assert [(p.devices, p.shared, [*p.outcomes]) for p in pairs] == [
        (("cpu", "cuda:0"), False, ["gloo"]),
        (("cpu", "cuda:1"), False, ["gloo"]),
        (("cpu", "cuda:0"), False, ["gloo"]),
        (("cuda:0", "cuda:1"), False, ["gloo", "nccl"]),
        (("cuda:0", "cuda:0"), True, ["gloo", "nccl"]),
        (("cuda:1", "cuda:0"), False, ["gloo", "nccl"]),
    ]


def test_what_does_not_work_is_named_with_the_way_out() -> None:
    apart, shared = try_pairs((ONE, TWO), 10, nccl_hangs) + try_pairs(
        (ONE, ONE), 10, nccl_hangs
    )
    way_out = 'gloo works; use torch.distributed.init_process_group("gloo")'
    assert advice(apart) == [
        f"cuda:0 - cuda:1: nccl {HANGS.problem}",
        f"cuda:0 - cuda:1: {way_out}",
    ]
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in advice(shared)[1]
    assert "2.30" in advice(shared)[1]
    assert len(advice(shared)) == 3
    assert advice(Pair(("cpu", "cpu"), True, {"gloo": WORKS})) == []
    assert (
        "nothing joins them"
        in advice(Pair(("cpu", "cuda:0"), False, {"gloo": HANGS}))[-1]
    )
    assert advice(
        Pair(("cuda:0", "cuda:1"), False, {"gloo": HANGS, "nccl": WORKS})
    ) == [f"cuda:0 - cuda:1: gloo {HANGS.problem}"]


def report(*pairs: Pair) -> Report:
    return Report("a", "EPYC", 2, {"torch": "2.13.0"}, (ONE, TWO, ONE), pairs)


def shown(of: Report) -> str:
    console = Console(file=StringIO(), width=160)
    show_report(of, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_report_is_healthy_if_each_pair_has_a_backend_that_works() -> None:
    half = Pair(("cuda:0", "cuda:1"), False, {"gloo": WORKS, "nccl": HANGS})
    none = Pair(("cpu", "cuda:0"), False, {"gloo": HANGS})
    assert report(half).healthy
    assert not report(half, none).healthy
    assert (
        json.loads(json.dumps(report(none).to_json()))["pairs"][0]["outcomes"]["gloo"][
            "problem"
        ]
        == HANGS.problem
    )
    text = shown(report(half))
    assert all(
        word in text
        for word in ("torch 2.13.0", "A100", "80 GB", "works, 0.5 s", "every pair has")
    )
    assert text.count("GPU-0") == 1  # two ranks, but one device
    assert "not every pair has" in shown(report(half, none))


def test_the_cpu_is_examined_for_real() -> None:
    found = examine([DeviceName("cpu"), DeviceName("cpu", 0.5)], 30)
    assert found.healthy
    assert [(p.devices, p.shared) for p in found.pairs] == [(CPUS, True)]
    assert found.versions["torch"]
    assert found.devices[0].memory_bytes > 1e8


def test_a_device_that_is_not_there_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 1)
    assert doctor.visible() == [DeviceName("cpu"), DeviceName("cuda:0")]
    with pytest.raises(
        HetConvError, match=r"'cuda:5' is not there; this process.* sees cpu, cuda:0"
    ):
        examine([DeviceName("cuda:5")], 10)
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 0)
    assert doctor.visible() == [DeviceName("cpu"), DeviceName("cpu")]
