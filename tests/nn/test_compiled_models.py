"""`torch.compile` of a split model leaves its forward to Python, and compiles what
stands around it.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hetconv
from tests.equivalence import (
    Differences,
    apart,
    assert_same,
    full_gradients,
    loss_of,
    pair,
)
from tests.nets import Chain, plan_of, splits_of
from tests.spawn import on_ranks, spawn

STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 3, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.relu(self.norm(self.one(x))))


def compiled(backend: str, within: bool) -> tuple[Differences, int, int]:
    """Differences over steps of training and inference, frames compiled in the first
    step, and in later ones.

    ``within``: the whole step's forward with its loss is compiled, not the model alone.
    """
    from torch._dynamo.utils import counters

    warnings.simplefilter(
        "ignore"
    )  # dynamo asks a tensor that it goes on with for its gradient, which torch warns of
    torch._dynamo.reset()
    counters.clear()
    serial, cut = pair(Block, splits_of(Block(), ("height", "filter"), (2, 1)), 2)
    run: Callable[[Tensor], Tensor]
    if within:
        run = torch.compile(lambda x: loss_of(cut(x * 2 + 1)), backend=backend)
    else:
        model = torch.compile(cut, backend=backend)
        run = lambda x: loss_of(model(x * 2 + 1))  # noqa: E731
    found: Differences = {}
    frames = []
    for i in range(STEPS):
        x = torch.randn(2, 3, 20, 20)
        serial.zero_grad(), cut.zero_grad()
        loss, expected = run(x), loss_of(serial(x * 2 + 1))
        loss.backward()
        expected.backward()
        found[f"{i} loss"] = apart(loss, expected)
        gradients = full_gradients(cut)
        found |= {
            f"{i} gradient {k}": apart(gradients[k], p.grad)
            for k, p in serial.named_parameters()
        }
        frames.append(sum(counters["frames"].values()))
    serial.eval(), cut.eval()
    with torch.no_grad():
        found["evaluated"] = apart(run(x), loss_of(serial(x * 2 + 1)))
    return found, frames[0], frames[-1] - frames[0]


@pytest.mark.parametrize("within", [False, True])
def test_a_compiled_model_trains_as_it_does_uncompiled(within: bool) -> None:
    answers = spawn(2, compiled, "aot_eager", within)
    assert_same([found for found, _, _ in answers])
    for _, first, later in answers:
        assert not within or first > 0
        assert later == 0


def copied() -> Differences:
    """A copy of a split model runs its own forward."""
    serial, cut = pair(Chain, splits_of(Chain(), ("height",), (2, 0, 1)), 3)
    twins = [copy.deepcopy(m) for m in (serial, cut)]
    with torch.no_grad():
        for twin in twins:
            for p in twin.parameters():
                p.mul_(2)
    x = torch.randn(2, 4, 16, 16)
    return {"model": apart(cut(x), serial(x)), "copy": apart(twins[1](x), twins[0](x))}


def test_a_copy_runs_its_own_forward() -> None:
    assert_same(on_ranks(3, copied))


def without_dynamo() -> bool:
    """Whether running a split model imports the compiler, which takes seconds."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    cut = hetconv.parallelize(
        model, plan_of(model, splits_of(model, ("height",), (2, 1)), 2)
    )
    before = "torch._dynamo" in sys.modules
    with torch.no_grad():
        cut(torch.randn(1, 3, 8, 8))
    return not before and "torch._dynamo" in sys.modules


def test_who_does_not_compile_does_not_load_the_compiler() -> None:
    assert not any(spawn(2, without_dynamo))
