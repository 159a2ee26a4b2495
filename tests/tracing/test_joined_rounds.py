"""Which norms send their moments in the messages of a convolution's halos."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hetconv.cost.propagate import propagate
from hetconv.operators.norms import GroupNorm
from hetconv.sharding.split import Split
from hetconv.tracing.tracer import capture

IMAGE = torch.empty(2, 8, 12, 12)


class Normed(nn.Module):
    def __init__(self, after, last):
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.after, self.last = after, last

    def forward(self, x):
        return self.last(self.after(self.norm(self.first(x))))


class ReadTwice(Normed):
    def forward(self, x):
        y = self.after(self.norm(self.first(x)))
        return self.last(y) + y


def joined_dims(graph):
    (found,) = [n.op.joined_dims for n in graph.nodes if isinstance(n.op, GroupNorm)]
    return found


CONV = nn.Conv2d(8, 8, 3, padding=1)
CASES = {
    "nothing between": (nn.Identity(), CONV, (2, 3)),
    "silu": (nn.SiLU(), CONV, (2, 3)),
    "relu in place": (nn.ReLU(inplace=True), CONV, (2, 3)),
    "sigmoid": (nn.Sigmoid(), CONV, ()),
    "1x1": (nn.SiLU(), nn.Conv2d(8, 8, 1), ()),
    "wide": (nn.SiLU(), nn.Conv2d(8, 8, (1, 3), padding=(0, 1)), (3,)),
    "patches": (nn.SiLU(), nn.Conv2d(8, 8, 2, stride=2), ()),
    "no convolution": (nn.SiLU(), nn.MaxPool2d(3), ()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_norm_joins_the_convolution_that_alone_reads_it(case):
    after, last, expected = CASES[case]
    assert joined_dims(capture(Normed(after, last), IMAGE)) == expected


def test_a_norm_that_is_read_twice_has_its_own_round():
    assert joined_dims(capture(ReadTwice(nn.SiLU(), CONV), IMAGE)) == ()
    two = Normed(lambda y: F.silu(y), nn.Sequential(CONV, CONV))
    assert joined_dims(capture(two, IMAGE)) == (2, 3)


@pytest.mark.parametrize(("kind", "rounds"), [("height", 0), ("filter", 1)])
def test_only_moments_without_halos_have_a_round(kind, rounds):
    graph = capture(Normed(nn.SiLU(), CONV), IMAGE)
    sizes = (6, 6) if kind == "height" else (3, 5)  # of which no group is whole
    splits = dict.fromkeys(("first", "last"), Split(kind, sizes))
    scheduled, _ = propagate(graph, splits, 2, "train")
    (norm,) = [op for op in scheduled if isinstance(op.node.op, GroupNorm)]
    assert [len(norm.waits_for(backward)) for backward in (False, True)] == [rounds] * 2
    # The moments are sent in any case.
    assert [len(norm.forward), len(norm.backward)] == [1, 1]
