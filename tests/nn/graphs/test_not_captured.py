"""What is not captured runs eagerly and is named; what a capture leaves as it is."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetconv.nn.step_graphs import EAGER_STEPS, StepGraphs
from hetconv.runtime.graph_capture import CaptureGuard, obstacle
from tests.nn.graphs.graphed import CPU, Graphed, images, pair, warm

Change = Callable[[nn.Module], object]


class Doubling(torch.autograd.Function):
    """Its backward reads a value on the host."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (2 if g.sum().item() != 0.5 else 3)


class Does(nn.Module):
    """A linear layer and a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(5, 5), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def with_hook(function: Callable[[Tensor], Tensor]) -> nn.Module:
    model = Does(function)
    model.layer.register_forward_hook(lambda *_: None)
    return model


class WritesToInput(Does):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        x.add_(1)
        return self.function(y)


UNCAPTURABLE: dict[str, tuple[nn.Module, str]] = {
    "item": (Does(lambda y: y * y.sum().item()), "aten::_local_scalar_dense"),
    "branch": (Does(lambda y: y if y.sum() > 0 else -y), "aten::_local_scalar_dense"),
    "nonzero": (Does(lambda y: y[y.nonzero()[:, 0]]), "aten::nonzero"),
    "mask": (Does(lambda y: y[y > 0]), "aten::index"),
    "host copy": (Does(lambda y: y + y.to("meta").numel()), "aten::_to_copy"),
    "backward": (Does(Doubling.apply), "aten::_local_scalar_dense"),
    "module hook": (with_hook(torch.relu), "module 'layer' has hooks"),
    "input": (WritesToInput(torch.relu), "the model writes to its input"),
}


@pytest.mark.parametrize("name", UNCAPTURABLE)
def test_what_cannot_be_captured_runs_eagerly_and_is_named_once(name: str) -> None:
    model, reason = UNCAPTURABLE[name]
    graphed, x = Graphed(model), torch.rand(3, 5)
    for _ in range(EAGER_STEPS):
        graphed(x)
    with pytest.warns(UserWarning, match=f"forward of it runs eagerly.*{reason}"):
        graphed(x)
    expected = model.forward(x.clone())
    torch.testing.assert_close(graphed(x.clone()), expected)
    assert graphed.capture.replays == 0


def test_a_mask_that_is_filled_with_one_value_can_be_captured() -> None:
    def filled(y: Tensor) -> Tensor:
        y = y.clone()
        y[y > 0] = 0.5
        return y

    graphed, x = Graphed(Does(filled)), torch.randn(3, 5)
    warm(graphed, x)
    assert graphed.capture.replays == 1
    torch.testing.assert_close(graphed(-x), graphed.model.forward(-x))


def test_hooks_of_parameters_run_once_in_each_step() -> None:
    plain, graphed = pair()
    for model in (plain, graphed.model):
        model.one.weight.register_hook(lambda g: g * 2)
    warm(graphed, images())
    plain.load_state_dict(graphed.model.state_dict())
    graphed.model.zero_grad()
    x = images()
    for model in (plain, graphed):
        model(x)["y"].sum().backward()
    torch.testing.assert_close(graphed.model.one.weight.grad, plain.one.weight.grad)


def test_a_capture_leaves_the_nodes_of_parameters_alone() -> None:
    """They may belong to the stream of an earlier step."""
    _, graphed = pair()
    weight = graphed.model.one.weight
    seen: list[bool] = []
    node = torch.autograd.graph.get_gradient_edge(weight).node
    node.register_prehook(lambda _: seen.append(True))
    for _ in range(EAGER_STEPS):
        graphed(images())["y"].sum().backward()
    assert len(seen) == EAGER_STEPS
    y = graphed(images())["y"]
    assert graphed.capture.captures == 2
    assert len(seen) == EAGER_STEPS
    assert graphed.model.one.weight is weight
    y.sum().backward()
    assert len(seen) == EAGER_STEPS + 1


def test_random_numbers_of_another_device_are_not_repeated() -> None:
    randint = torch.ops.aten.randint.default
    gpu = torch.device("cuda")
    assert "random numbers on the CPU" in str(obstacle(randint, (9, [2]), {}, gpu))
    on_gpu = {"device": gpu}
    assert obstacle(randint, (9, [2]), on_gpu, gpu) is None


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (object(), "an argument is a object"),
        (torch.ones(2, device="meta"), "an input is on meta, not on cpu"),
    ],
)
def test_an_argument_that_cannot_be_compared_is_named_once(
    argument: Any, reason: str
) -> None:
    graphed = Graphed(Does(torch.relu))
    with pytest.warns(UserWarning, match=reason):
        assert graphed.graphs.signature(graphed.model, "it", (argument,), {}) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert graphed.graphs.signature(graphed.model, "it", (argument,), {}) is None


def test_a_tensor_that_is_given_twice_is_one_input() -> None:
    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + 2 * b

    graphed, a, b = Graphed(Sum()), torch.ones(3), torch.full((3,), 5.0)
    for _ in range(EAGER_STEPS + 1):
        assert graphed(a, a).eq(3).all()
    for _ in range(EAGER_STEPS + 2):
        assert graphed(a, b).eq(11).all()


def test_memory_that_a_graph_reads_stays() -> None:
    """Also where a cache that gave it to the model has forgotten it."""
    guard, x, cached = CaptureGuard(CPU), torch.rand(5), [torch.full((5,), 3.0)]
    memory = weakref.ref(cached[0].untyped_storage())
    with guard:
        made = x * cached[0]
        _ = made + 1
    of_result = weakref.ref(made.untyped_storage())
    cached.clear()
    del made
    gc.collect()
    assert memory() is not None
    assert of_result() is None
    del guard
    gc.collect()
    assert memory() is None


def test_a_copied_model_captures_for_itself() -> None:
    _, graphed = pair()
    warm(graphed, images())
    copied = copy.deepcopy(graphed.graphs)
    assert isinstance(copied, StepGraphs)
    signature = copied.signature(graphed.model, "it", (images(),), {})
    assert signature is not None
    assert not signature.is_ready
