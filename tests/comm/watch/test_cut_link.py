"""A rank whose network link is cut is named by the others. Each rank has a network
namespace of its own, as if on a host of its own, and a router stands between them.

Run as a program, this file is one of the ranks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hetconv
from hetconv.comm.rank_group import rank_group_of
from hetconv.comm.watch import heartbeat
from hetconv.sharding.split import Split
from tests.nets import plan_of

RANKS = 3
LOST_AFTER_S = 2.0
TIMEOUT_S = 60.0
READY, LOST = "trains", "lost:"


def train(rank: int) -> None:
    """Trains until another rank is lost, and prints what is said then."""
    heartbeat.LOST_AFTER_S = LOST_AFTER_S
    dist.init_process_group(
        "gloo",
        # In a network of the test's own, where any port is free.
        init_method="tcp://10.0.0.2:29500",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1))
    splits = {name: Split("height", (3, 3, 2)) for name in ("0", "1")}
    cut = hetconv.parallelize(model, plan_of(model, splits, RANKS))
    assert not rank_group_of().channels
    try:
        for step in range(10**9):
            cut(torch.randn(2, 3, 8, 8)).sum().backward()
            time.sleep(0.01)
            if step == 3:
                print(READY, flush=True)
    except hetconv.LostRankError as error:
        print(LOST, error, flush=True)
        dist.destroy_process_group()


def ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


class Network:
    """The namespaces ``0``, ``1``, ... and ``router``; of each rank, 10.0.<rank>.0/24."""

    def __init__(self, name: str):
        self.name, self._made = name, list[str]()

    def make(self) -> None:
        router = self._namespace("router")
        forward = ["sysctl", "-qw", "net.ipv4.ip_forward=1"]
        ip("netns", "exec", router, *forward)
        for rank in range(RANKS):
            here, near = self._namespace(str(rank)), f"10.0.{rank}"
            peer = ["type", "veth", "peer", "name", f"to{rank}", "netns", router]
            ip("link", "add", "eth0", "netns", here, *peer)
            ip("-n", here, "address", "add", f"{near}.2/24", "dev", "eth0")
            ip("-n", router, "address", "add", f"{near}.1/24", "dev", f"to{rank}")
            ip("-n", router, "link", "set", f"to{rank}", "up")
            for device in ("lo", "eth0"):
                ip("-n", here, "link", "set", device, "up")
            ip("-n", here, "route", "add", "default", "via", f"{near}.1")

    def cut(self, rank: int) -> None:
        """Lets the router drop what is for a rank, without a word to the senders."""
        router = f"{self.name}-router"
        ip("-n", router, "route", "replace", "blackhole", f"10.0.{rank}.0/24")

    def start(self, rank: int, output: Path) -> subprocess.Popen[bytes]:
        command = ["ip", "netns", "exec", f"{self.name}-{rank}", sys.executable]
        env = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        with output.open("wb") as file:
            return subprocess.Popen(
                [*command, "-m", __name__, str(rank)], stdout=file, stderr=file, env=env
            )

    def remove(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "delete", name], check=False)

    def _namespace(self, kind: str) -> str:
        name = f"{self.name}-{kind}"
        ip("netns", "add", name)
        self._made.append(name)
        return name


@pytest.fixture
def network() -> Iterator[Network]:
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip, of iproute2")
    made = Network(f"hetconv-{uuid.uuid4().hex[:8]}")
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"this user may not make network namespaces: {error.stderr}")
    yield made
    made.remove()


def test_a_rank_whose_link_is_cut_is_named(network: Network, tmp_path: Path) -> None:
    """Its host has the store of the process group, too."""
    outputs = [tmp_path / str(rank) for rank in range(RANKS)]
    ranks = [network.start(rank, output) for rank, output in enumerate(outputs)]
    try:
        until = time.monotonic() + TIMEOUT_S
        while not all(READY in output.read_text() for output in outputs):
            assert time.monotonic() < until, [output.read_text() for output in outputs]
            time.sleep(0.1)
        network.cut(0)
        for process in ranks:
            process.wait(TIMEOUT_S)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    said = [output.read_text().partition(LOST)[2] for output in outputs]
    how = f"which has not answered for {LOST_AFTER_S:.0f}."
    for rank, text in enumerate(said):
        lost = 0 if rank else 1  # the first that does not answer
        assert f"rank {rank} of {RANKS} lost rank {lost}, which has not" in text, text
    assert any(how in text for text in said), said
    assert {process.returncode for process in ranks} == {0}, said


if __name__ == "__main__":
    train(int(sys.argv[1]))
