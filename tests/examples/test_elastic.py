"""Elastic training: three machines under torch's agents, of which one is lost.

A machine here is an agent and its worker on this host; killing it kills both at once.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest
import torch.distributed as dist

from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import DeviceModel, LinkModel
from tests import ROOT

NAMES = ("a", "b", "c")
STEPS, SAVE_EVERY = 80, 10
AGENT = (
    "--nnodes 1:3 --nproc-per-node 1 --max-restarts 9 --rdzv-backend c10d --rdzv-id job "
    "--local-addr localhost --rdzv-conf "
    "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=5"
).split()


class Step(NamedTuple):
    number: int
    loss: float
    world: int


class Machines:
    """Agents, the output of their workers, and what is left of them at the end."""

    def __init__(self, folder: Path):
        self._folder, self._mark = folder, f"HETCONV_TEST={uuid4().hex}"
        name, value = self._mark.split("=")
        self._env = os.environ | {
            name: value,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        # Kept here, so that any agent can be lost; at a port that the system chooses.
        self._store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *, agent: bool = True) -> None:
        run = "run" if agent else f"run-{name}"
        endpoint = f"localhost:{self._store.port}"
        launcher = ("-m", "torch.distributed.run", *AGENT, "--rdzv-endpoint", endpoint)
        script = (
            ROOT / "examples" / "elastic.py",
            *("--profile", self._folder / "cluster.json", "--name", name[0]),
            *("--checkpoint", self._folder / run, "--dtype", "float64"),
            *("--steps", STEPS, "--save-every", SAVE_EVERY),
        )
        with (self._folder / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, *(launcher if agent else ()), *map(str, script)],
                stdout=log,
                stderr=log,
                env=self._env,
            )

    def worker(self, name: str) -> int:
        """The process that a machine's agent has started last."""
        agent = self._running[name].pid
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        return int(children[-1])

    def lose(self, name: str) -> None:
        """The agent first, so that it cannot tell anybody that its worker died."""
        worker = self.worker(name)
        self._running[name].kill()
        os.kill(worker, signal.SIGKILL)
        self._running[name].wait()

    def wait(self, name: str) -> int:
        return self._running[name].wait()

    def output(self, *names: str) -> str:
        files = (self._folder / f"{name}.log" for name in names or NAMES)
        return "\n".join(file.read_text(errors="replace") for file in files)

    def steps(self, *names: str) -> list[Step]:
        found = re.findall(
            r"^step (\d+) loss (\S+) world (\d)$", self.output(*names), re.M
        )
        return [Step(int(n), float(loss), int(world)) for n, loss, world in found]

    def until(self, done: Callable[[], bool]) -> None:
        while not done():  # the test's timeout is the limit
            ended = [p.poll() for p in self._running.values() if p.poll() is not None]
            assert not any(code for code in ended if code != -signal.SIGKILL), (
                self.output()
            )
            time.sleep(0.02)

    def end(self) -> None:
        """Kills all that is left: agents start workers in sessions of their own."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self._mark.encode() in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        for popen in self._running.values():
            popen.wait()


@contextmanager
def machines(folder: Path) -> Iterator[Machines]:
    found = Machines(folder)
    try:
        yield found
    finally:
        found.end()


def cluster() -> ClusterProfile:
    """Three CPUs, slow enough beside their links that a plan uses all of them."""
    devices = tuple(
        DeviceModel(name, "cpu", 1e10, {"float32": rate}, 1e11)
        for name, rate in zip(NAMES, (3e9, 2e9, 1e9), strict=True)
    )
    pairs = combinations(range(len(NAMES)), 2)
    return ClusterProfile(
        devices, {f"{a}-{b}": LinkModel(1e-6, 1e-10) for a, b in pairs}
    )


def starts(output: str) -> list[tuple[str, str, int]]:
    """Of each start that got so far: its devices, its kind of plan, and what was done."""
    found = re.findall(r"^([abc; ]+): (.+), after step (\d+)$", output, re.M)
    return [(devices, plan, int(done)) for devices, plan, done in found]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="finds the processes in /proc"
)
def test_a_lost_worker_and_a_lost_machine_change_no_loss(tmp_path: Path) -> None:
    cluster().save(tmp_path / "cluster.json")
    with machines(tmp_path) as job:
        for name in NAMES:
            job.start(name)
        job.start("alone", agent=False)
        done = SAVE_EVERY + 2
        job.until(lambda: any(s.world == 3 and s.number >= done for s in job.steps()))

        os.kill(job.worker("b"), signal.SIGKILL)
        job.until(
            lambda: (
                sum("a; b; c" in devices for devices, *_ in starts(job.output())) >= 2
            )
        )
        done = 2 * SAVE_EVERY + 2
        job.until(lambda: any(s.world == 3 and s.number >= done for s in job.steps()))

        job.lose("a")  # which has rank 0 most of the time
        assert [job.wait("b"), job.wait("c"), job.wait("alone")] == [0, 0, 0], (
            job.output()
        )

        *_, (devices, plan, done) = starts(job.output("b", "c"))
        assert (devices, done % SAVE_EVERY) == ("b; c", 0)
        assert done >= 2 * SAVE_EVERY
        assert "alone" not in plan
        by_two = [step for step in job.steps("b", "c") if step.world == 2]
        assert [step.number for step in by_two] == list(range(done + 1, STEPS + 1))
        expected = {step.number: step.loss for step in job.steps("alone")}
        assert len(expected) == STEPS
        for number, loss, _ in job.steps():
            assert loss == pytest.approx(expected[number], rel=1e-10), number
