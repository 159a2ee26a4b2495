"""Steps in which nothing is sent, beside which it shows what messages cost."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import hetconv
from hetconv.comm.rank_group import (
    count_sent,
    no_payload,
    rank_group_of,
    through_backend,
)
from hetconv.comm.redistribute import redistribute_local
from hetconv.sharding.layout import Layout
from hetconv.sharding.split import SplitKind
from tests.nets import Block, plan_of, splits_of
from tests.spawn import on_ranks


def nobody_answers(by_backend: bool) -> tuple[Tensor, Tensor] | None:
    """Rank 0 alone gathers halves of threes, and halves of a sum of them."""
    group = rank_group_of()
    if group.rank:
        return None
    halves, summands = (
        Layout.sharded((1, 4, 2, 2), 1, (2, 2)),
        Layout.partial((1, 4, 2, 2), 2),
    )
    with no_payload(), through_backend() if by_backend else nullcontext():
        gathered = redistribute_local(
            group,
            torch.full((1, 2, 2, 2), 3.0),
            halves,
            Layout.replicated((1, 4, 2, 2), 2),
        )
        summed = redistribute_local(
            group, torch.full((1, 4, 2, 2), 3.0), summands, halves
        )
    return gathered, summed


@pytest.mark.parametrize("by_backend", [False, True])
def test_who_is_silent_waits_for_nobody_and_finds_zeros(by_backend: bool) -> None:
    found, _ = on_ranks(2, nobody_answers, by_backend)
    gathered, summed = found
    assert gathered[:, :2].eq(3).all()
    assert gathered[:, 2:].eq(0).all()
    assert summed.eq(torch.full((1, 2, 2, 2), 3.0)).all()


def steps(kind: SplitKind) -> tuple[list[int], list[int], bool]:
    """Bytes sent by a step in training, and by a silent one; whether the first's
    gradients are found again after it.
    """
    torch.manual_seed(0)
    model, x = Block(4, 8), torch.randn(2, 4, 12, 8)
    split = hetconv.parallelize(
        copy.deepcopy(model), plan_of(model, splits_of(model, (kind,), (2, 1)), 2)
    )

    def step() -> tuple[int, list[Tensor]]:
        split.zero_grad()
        with count_sent() as sent:
            split(x).square().sum().backward()
        return sum(sent.values()), [
            p.grad.clone() for p in split.parameters() if p.grad is not None
        ]

    with no_payload():
        sent_in_silence, zeroed = step()
    (sent, first), (again, second) = step(), step()
    shapes = [g.shape for g in zeroed] == [g.shape for g in first]
    return (
        [sent, again],
        [sent_in_silence],
        shapes and all(a.equal(b) for a, b in zip(first, second, strict=True)),
    )


@pytest.mark.parametrize("kind", ["sample", "filter", "channel", "height", "width"])
def test_a_silent_step_sends_nothing_and_leaves_nothing_behind(kind: SplitKind) -> None:
    for sent, in_silence, same in on_ranks(2, steps, kind):
        assert in_silence == [0]
        assert sent[0] == sent[1] > 0
        assert same
