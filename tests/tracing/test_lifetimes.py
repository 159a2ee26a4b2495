"""How long a program holds its results, and what autograd saves of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hetconv.tracing.graph import Graph
from hetconv.tracing.lifetimes import Lifetimes
from hetconv.tracing.tracer import capture
from tests.nets import NETS

IMAGE = torch.empty(2, 4, 8, 8)


class Program(nn.Module):
    """A convolution, and functions of it."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.run = nn.Conv2d(4, 4, 1), run
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.SiLU(), nn.Conv2d(4, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def captured(run: Callable[[nn.Module, Tensor], Tensor]) -> tuple[Graph, Lifetimes]:
    graph = capture(Program(run), IMAGE)
    assert graph.lifetimes is not None
    return graph, graph.lifetimes


def in_local_variable(m: nn.Module, x: Tensor) -> Tensor:
    a = m.conv(x)
    b = a * 2
    c = b.sigmoid()
    return c + 1


def chained(m: nn.Module, x: Tensor) -> Tensor:
    return ((m.conv(x) * 2).sigmoid()) + 1


def rebound(m: nn.Module, x: Tensor) -> Tensor:
    x = m.conv(x)
    x = x * 2
    x = x.sigmoid()
    return x + 1


def in_list(m: nn.Module, x: Tensor) -> Tensor:
    found = [m.conv(x)]
    for _ in range(2):
        found.append(found[-1].sigmoid())
    return found.pop() + 1


@pytest.mark.parametrize(
    ("run", "last"),
    [
        (in_local_variable, (3, 3, 3, 4)),
        (chained, (1, 2, 3, 4)),
        (rebound, (1, 2, 3, 4)),
        (in_list, (3, 3, 3, 4)),
    ],
)
def test_a_result_lives_while_the_program_refers_to_it(
    run: Callable[[nn.Module, Tensor], Tensor], last: tuple[int, ...]
) -> None:
    assert captured(run)[1].last == last


def test_a_call_of_a_module_holds_its_arguments() -> None:
    graph, found = captured(lambda m, x: m.block(m.conv(x)).relu_())
    assert [n.function for n in graph.nodes] == "conv2d conv2d silu conv2d relu".split()
    assert found.last[0] == 3
    assert found.last[3] == 5  # written to in place, and returned


def test_what_autograd_saves_is_known() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        y = F.silu(m.conv(x)).relu()
        return F.max_pool2d(m.conv(y) + y, 2)

    graph, found = captured(run)
    functions = "conv2d silu relu conv2d add max_pool2d".split()
    assert [n.function for n in graph.nodes] == functions
    saved = [set(), {0}, {2}, {2}, set(), {4}]  # inputs of the model are no results
    assert [set(s) for s in found.saves] == saved
    indices = 2 * 4 * 4 * 4 * 8
    assert found.saved_bytes == (0, 0, 0, 0, 0, indices)


def test_a_checkpoint_saves_nothing_within() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        y = checkpoint(m.block, m.conv(x), use_reentrant=False)
        return y.sigmoid()

    graph, found = captured(run)
    functions = "conv2d conv2d silu conv2d sigmoid".split()
    assert [n.function for n in graph.nodes] == functions
    # The checkpoint saves what it will compute from.
    assert [set(s) for s in found.saves] == [set(), {0}, set(), set(), {4}]


def test_nothing_is_saved_without_gradients() -> None:
    with torch.no_grad():
        graph = capture(Program(chained), IMAGE)
    assert graph.lifetimes is not None
    assert not set().union(*graph.lifetimes.saves)


def test_a_model_within_a_transform_is_captured_without_lifetimes() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        y = torch.func.vmap(lambda v: v.sin())(m.conv(x))
        return torch.func.grad(lambda v: v.square().sum())(y)

    model = Program(run)
    graph = capture(model, IMAGE)
    assert graph.nodes
    assert graph.lifetimes is None


@pytest.mark.parametrize("net", NETS)
def test_a_result_lives_at_least_until_it_is_read(net: str) -> None:
    make, shape = NETS[net]
    graph = capture(make(), torch.empty(shape))
    assert graph.lifetimes is not None
    for k, (node, readers) in enumerate(
        zip(graph.nodes, graph.last_readers, strict=True)
    ):
        if not node.views:
            assert graph.lifetimes.last[k] >= readers, (k, node)
