"""Exchanges by NCCL: how many calls they are, and that they move what others move.

There is no GPU: a process group that records calls stands in for NCCL, or gloo does
under its name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.comm import collectives, exchange
from hetconv.comm.packed_exchange import Part, exchange_together
from hetconv.comm.rank_group import (
    RankGroup,
    count_sent,
    no_payload,
    rank_group_of,
)
from hetconv.comm.redistribute import moved_back, redistribute_local
from hetconv.comm.watch.deadlock import DeadlockWatch
from hetconv.ops import dispatch  # noqa: F401  runs functions on HetTensors
from hetconv.runtime.graph_capture import CaptureGuard
from hetconv.runtime.het_tensor import HetTensor
from hetconv.sharding.layout import Box, Layout
from hetconv.sharding.moves import Move
from tests.spawn import on_ranks

NOBODY: Any = None


class Call(NamedTuple):
    """A call of the backend: its name, and the elements of each message."""

    name: str
    sizes: tuple[int, ...]


class Work(NamedTuple):
    """In place of a message that is under way."""

    op: Any
    tensor: Tensor
    group: Any = None
    group_peer: int = 0
    tag: int = 0

    def wait(self) -> None:
        """Nothing is sent."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """All calls of the backend, which sends nothing."""
    found: list[Call] = []

    def batch(ops: list[Work]) -> list[Work]:
        sizes = tuple(op.tensor.numel() for op in ops)
        found.append(Call("one group", sizes))
        return ops

    def collective(name: str) -> Any:
        def call(result: Tensor, sent: Tensor, **_: Any) -> Work:
            found.append(Call(name, (sent.numel(), result.numel())))
            return Work(None, result)

        return call

    monkeypatch.setattr(exchange.dist, "P2POp", Work)
    monkeypatch.setattr(exchange.dist, "batch_isend_irecv", batch)
    monkeypatch.setattr(collectives, "_all_gather", collective("all-gather"))
    monkeypatch.setattr(collectives, "_reduce_scatter", collective("reduce-scatter"))
    return found


def nccl_group(rank: int, size: int) -> RankGroup:
    watch = DeadlockWatch.__new__(DeadlockWatch)
    return RankGroup(NOBODY, NOBODY, rank, size, "nccl", watch)


SHAPE = (4, 6, 8, 2)  # N, C, H, W
WHOLE = Layout.replicated(SHAPE, 2)
PARTIAL = Layout.partial(SHAPE, 2)


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        (Layout.sharded(SHAPE, 0, (2, 2)), WHOLE, [("all-gather", (192, 384))]),
        (PARTIAL, Layout.sharded(SHAPE, 0, (2, 2)), [("reduce-scatter", (384, 192))]),
        (Layout.sharded(SHAPE, 0, (3, 1)), WHOLE, [("one group", (288, 96))]),
        (Layout.sharded(SHAPE, 1, (3, 3)), WHOLE, [("one group", (192, 192))]),
        (WHOLE, Layout.sharded(SHAPE, 1, (3, 3)), []),
    ],
)
def test_a_move_is_one_call(
    src: Layout, dst: Layout, expected: list[tuple[str, Any]], calls: list[Call]
) -> None:
    group = nccl_group(0, 2)
    local = torch.zeros(src.boxes[0].shape)
    with count_sent() as sent:
        y = redistribute_local(group, local, src, dst)
    assert y.shape == dst.boxes[0].shape
    assert calls == expected
    assert sum(sent.values()) == sum(
        box.numel * 4
        for box in [src.boxes[0].intersect(dst.boxes[1])]
        if src.kind != "replicated"
    )


def test_an_all_reduce_among_three_is_two_collectives(calls: list[Call]) -> None:
    shape = (12, 5)
    src, dst = Layout.partial(shape, 3), Layout.replicated(shape, 3)
    redistribute_local(nccl_group(1, 3), torch.zeros(shape), src, dst)
    assert calls == [("reduce-scatter", (60, 20)), ("all-gather", (20, 60))]


def test_halos_of_both_sides_are_one_group(calls: list[Call]) -> None:
    """Of the rank in the middle, forward and backward."""
    group, shape = nccl_group(1, 3), (2, 4, 12, 5)
    layout = Layout.sharded(shape, 2, (4, 5, 3))
    x = HetTensor.wrap(torch.zeros(2, 4, 5, 5, requires_grad=True), layout, group)
    y = F.max_pool2d(x, 3, 1, 1)
    row = 2 * 4 * 5
    assert calls == [("one group", (row,) * 4)]
    y.local.sum().backward()
    assert calls == [("one group", (row,) * 4)] * 2


def test_pieces_of_several_exchanges_are_one_message_to_each_rank(
    calls: list[Call],
) -> None:
    group = nccl_group(0, 2)
    held, wanted = (Box((0,), (3,)), Box((3,), (7,))), (Box.whole((7,)),) * 2
    parts = [
        Part(torch.zeros(3, dtype=torch.float64), held, wanted),
        Part(torch.zeros(3), held, wanted),
    ]
    exchange_together(group, parts)
    assert calls == [("one group", (3 * 2 + 3, 4 * 2 + 4))]


def moves(world: int) -> list[tuple[Layout, Layout]]:
    """Gathers and sums, even and uneven, of images and of other tensors."""
    sizes = {2: [(2, 2), (3, 1), (4, 0)], 3: [(2, 2, 2), (3, 2, 1), (4, 0, 2)]}[world]
    found = []
    for of_ranks in sizes:
        n = sum(of_ranks)
        for shape, dim in (
            ((n, 3, 4, 2), 0),
            ((1, 3, n, 2), 2),
            ((2, 3, n, 2), 2),
            ((1, n, 1, 1), 1),
            ((2, n, 3, 2), 1),
            ((n, 5), 0),
            ((5, n), 1),
            ((n,), 0),
            ((n, 2, 3, 2, 2), 0),
        ):
            parts = Layout.sharded(shape, dim, of_ranks)
            found += [(parts, Layout.replicated(shape, world))]
            found += [(Layout.partial(shape, world), parts)]
    shape = (12, 5)
    found += [(Layout.partial(shape, world), Layout.replicated(shape, world))]
    return found


def moved(world: int) -> list[bool]:
    """Whether each move, and its adjoint, is by NCCL's way what it is by the other."""
    group = rank_group_of()
    named_nccl = replace(group, backend="nccl", channels={})
    same = []
    for src, dst in moves(world):
        x = torch.rand(src.boxes[group.rank].shape, dtype=torch.float64)
        g = torch.rand(dst.boxes[group.rank].shape, dtype=torch.float64)
        if dst.kind == "replicated":  # a gradient that is the same on every rank
            torch.manual_seed(1)
            g = torch.rand(dst.shape, dtype=torch.float64)
        results = [
            (
                redistribute_local(each, x, src, dst),
                moved_back(g, Move(src, dst), each),
            )
            for each in (group, named_nccl)
        ]
        same += [torch.allclose(a, b) for a, b in zip(*results, strict=True)]
    return same


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_move_what_messages_move(world: int) -> None:
    for same in on_ranks(world, moved, world):
        assert all(same)
        assert len(same) == 2 * len(moves(world))


def captured() -> list[bool]:
    """What a guard of captures lets through: messages, a gather and a sum."""
    group = replace(rank_group_of(), backend="nccl", channels={})
    found = []
    for sizes in ((2, 2), (3, 1)):
        parts, whole = Layout.sharded((4,), 0, sizes), Layout.replicated((4,), 2)
        with CaptureGuard(torch.device("cpu")):
            x = torch.full((sizes[group.rank],), float(group.rank))
            gathered = redistribute_local(group, x, parts, whole)
            summed = redistribute_local(group, gathered, Layout.partial((4,), 2), parts)
        of_ranks = [0.0] * sizes[0] + [1.0] * sizes[1]
        found.append(gathered.tolist() == of_ranks)
        found.append(bool(summed.eq(2.0 * group.rank).all()))
    return found


def test_messages_can_be_captured() -> None:
    assert on_ranks(2, captured) == [[True] * 4] * 2


def in_silence() -> bool:
    group = replace(rank_group_of(), backend="nccl", channels={})
    parts, whole = Layout.sharded((4,), 0, (2, 2)), Layout.replicated((4,), 2)
    with no_payload():
        y = redistribute_local(group, torch.full((2,), 3.0), parts, whole)
    return sorted(y.tolist()) == [0.0, 0.0, 3.0, 3.0]


def test_a_gather_in_silence_has_zeros_of_the_others() -> None:
    assert on_ranks(2, in_silence) == [True, True]
