"""Ranks that go different ways: each raises an error that names the calls of both, and
where they are made.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetconv
from hetconv.comm import rank_group
from hetconv.comm.watch import deadlock
from hetconv.sharding.split import Split, SplitKind
from tests.nets import plan_of
from tests.spawn import on_ranks, outcomes


class Branches(nn.Module):
    """Two blocks of the same shapes, of which one is taken, and one that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.left, self.right = (
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        self.dropped, self.head = (
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 3, 3, padding=1),
        )

    def forward(self, x: Tensor, path: str = "left", drop: bool = False) -> Tensor:
        y = torch.relu(self.stem(x))
        y = torch.relu(self.left(y) if path == "left" else self.right(y))
        if not drop:
            y = torch.relu(self.dropped(y))
        out: Tensor = self.head(y)
        return out


Program = Callable[[nn.Module, Tensor, int], None]


def single_path(model: nn.Module, x: Tensor, rank: int) -> None:
    model(x, random.Random(rank).choice(["left", "right"]))


def layer_drop(model: nn.Module, x: Tensor, rank: int) -> None:
    model(x, drop=random.Random(rank).random() < 0.5)


def validation_on_one_rank(model: nn.Module, x: Tensor, rank: int) -> None:
    if rank == 0:
        with torch.no_grad():
            model(x)
    model(x).sum().backward()


def forward_again_on_one_rank(model: nn.Module, x: Tensor, rank: int) -> None:
    loss = model(x).sum()
    if rank == 0:
        loss = loss + model(x).sum()
    loss.backward()


def loss_fails_on_one_rank(model: nn.Module, x: Tensor, rank: int) -> None:
    for _ in range(2):
        try:
            if rank == 0:
                loss = model(x).view(7, 7)
            else:
                loss = model(x).sum()
        except RuntimeError:  # of a shape that does not fit
            continue
        loss.backward()


def backward_on_one_rank(model: nn.Module, x: Tensor, rank: int) -> None:
    loss = model(x).sum()
    if rank == 0:
        loss.backward()
    else:
        hetconv.full_state_dict(model)


# What each must say: the calls of both ranks, and a word of the line that each is at.
PROGRAMS: dict[Program, tuple[str, ...]] = {
    single_path: ("layer 'left'", "layer 'right'", "in forward"),
    layer_drop: ("layer 'dropped'", "in forward"),
    validation_on_one_rank: (
        "gradients False",
        "gradients True",
        "in validation_on_one_rank",
    ),
    forward_again_on_one_rank: (
        "forward",
        "the backward pass of",
        "in forward_again_on_one_rank",
    ),
    loss_fails_on_one_rank: (
        "forward",
        "the backward pass of",
        "in loss_fails_on_one_rank",
    ),
    backward_on_one_rank: (
        "full_state_dict",
        "the backward pass of",
        "in backward_on_one_rank",
    ),
}


def said(
    kind: SplitKind, sizes: tuple[int, ...], hosts: tuple[int, ...]
) -> dict[str, str]:
    """What each program's error says, each in a process group of its own. ``hosts``: of
    the ranks.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadlock, "MIN_REPORTED_WAIT_S", 0.3)
        patch.setattr(deadlock, "POLL_S", 0.1)
        return {
            program.__name__: said_by(program, kind, sizes, hosts)
            for program in PROGRAMS
        }


def on_hosts(hosts: tuple[int, ...]) -> dist.ProcessGroup:
    """A process group of which the messages between ranks of different hosts go by its backend."""
    group = dist.new_group()
    ranks = rank_group.rank_group_of(group)
    near = {
        peer: channel
        for peer, channel in ranks.channels.items()
        if hosts[peer] == hosts[ranks.rank]
    }
    rank_group._groups[group] = replace(
        ranks, channels=near, one_host=len(set(hosts)) == 1
    )
    return group


def said_by(
    program: Program, kind: SplitKind, sizes: tuple[int, ...], hosts: tuple[int, ...]
) -> str:
    torch.manual_seed(0)
    model = Branches()
    splits = {name: Split(kind, sizes) for name, _ in model.named_children()}
    if kind == "channel":
        del splits["stem"]  # of three channels
    if kind == "filter":
        del splits["head"]
    cut = hetconv.parallelize(
        model, plan_of(model, splits, len(sizes)), group=on_hosts(hosts)
    )
    try:
        program(cut, torch.randn(2, 3, 8, 8), min(dist.get_rank(), 1))
    except hetconv.DisagreementError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("apart", [False, True], ids=["one host", "several hosts"])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("height", (5, 3)),
        ("filter", (5, 3)),
        ("channel", (5, 3)),
        ("height", (4, 2, 2)),
    ],
)
def test_both_ranks_say_what_each_of_them_does(
    kind: SplitKind, sizes: tuple[int, ...], apart: bool
) -> None:
    hosts = (
        *[0] * (len(sizes) - 1),
        int(apart),
    )  # only the last one is on another host
    for ok, of_programs in outcomes(len(sizes), said, kind, sizes, hosts):
        assert ok, of_programs
        for program, expected in PROGRAMS.items():
            text = of_programs[program.__name__]
            assert all(words in text for words in expected), text
            assert text.count("test_ranks_apart.py:") >= 2, text


def waiting(
    tag: int, peer: int | None, *, under_way: tuple[int, ...] = (), collectives: int = 0
) -> deadlock.Wait:
    return deadlock.Wait(1, 1, tag, peer, under_way, collectives, "layer 'a'")


@pytest.mark.parametrize(
    ("here", "there", "for_ever"),
    [
        (waiting(7, 1), waiting(8, 0), True),
        (waiting(7, 1), waiting(8, None), True),
        (waiting(7, 1), waiting(7, 0), False),  # a slow network
        (waiting(7, 1), waiting(8, 2), False),  # rank 2 may come
        (
            waiting(7, 1),
            waiting(8, 0, under_way=(7,)),
            False,
        ),  # the other one has sent it
        (
            waiting(7, None),
            waiting(8, 0, collectives=1),
            False,
        ),  # the other one has left the collective
    ],
)
def test_only_ranks_that_wait_for_each_other_for_ever_are_apart(
    here: deadlock.Wait, there: deadlock.Wait, for_ever: bool
) -> None:
    assert deadlock.wait_for_ever((0, here), (1, there)) is for_ever
    assert deadlock.wait_for_ever((1, there), (0, here)) is for_ever


def late() -> float:
    """What a model gives while one rank is late in each step, and both watch each other's waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadlock, "MIN_REPORTED_WAIT_S", 0.0)
        patch.setattr(deadlock, "POLL_S", 0.01)
        torch.manual_seed(0)
        model = Branches()
        splits = {name: Split("height", (5, 3)) for name, _ in model.named_children()}
        cut = hetconv.parallelize(
            model, plan_of(model, splits, 2), group=on_hosts((0, 1))
        )
        x = torch.randn(2, 3, 8, 8)
        for step in range(4):
            if dist.get_rank() == step % 2:
                time.sleep(0.3)
            y = cut(x)
        return float((y - model(x)).abs().max())


def test_a_rank_that_is_late_is_not_apart() -> None:
    assert all(found <= 1e-6 for found in on_ranks(2, late))
