"""Captured steps: when a step is captured and replayed, and when it runs eagerly."""

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

from hetconv.errors import HetConvError
from hetconv.nn.step_graphs import EAGER_STEPS, MAX_SIGNATURES, StepGraphs
from hetconv.runtime.graph_capture import CaptureGuard, obstacle
from tests.captures import RecordingCapture

CPU = torch.device("cpu")
Change = Callable[[nn.Module], object]


class Net(nn.Module):
    """Layers with parameters and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.two = nn.Linear(4, 3)
        self.runs = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        self.runs += 1
        y = torch.relu(self.norm(self.one(x)))
        return {"y": self.two(y.mean((2, 3))) * scale}


class Graphed:
    """Calls a module through `StepGraphs`, as a parallelized model does."""

    def __init__(self, model: nn.Module):
        self.model, self.capture = model, RecordingCapture(model)
        self.graphs = StepGraphs(CPU, lambda: self.capture)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def run(args: Any, kwargs: Any) -> Any:
            return self.model.forward(*args, **kwargs)

        signature = self.graphs.signature(self.model, "forward of it", args, kwargs)
        if signature is None:
            return run(args, kwargs)
        return signature(run, args, kwargs)


def images(n: int = 2) -> Tensor:
    return torch.randn(n, 2, 6, 5)


def warm(graphed: Graphed, *args: Any) -> None:
    for _ in range(EAGER_STEPS + 1):
        graphed(*args)


def pair() -> tuple[Net, Graphed]:
    torch.manual_seed(0)
    plain = Net()
    return plain, Graphed(copy.deepcopy(plain))


@pytest.mark.parametrize("train", [False, True])
def test_an_inference_is_captured_after_two_and_then_replayed(train: bool) -> None:
    plain, graphed = pair()
    plain.train(train), graphed.model.train(train)
    with torch.no_grad():
        for _ in range(EAGER_STEPS + 3):
            x = images()
            assert torch.equal(graphed(x)["y"], plain(x)["y"])
    assert graphed.model.runs == EAGER_STEPS + 1
    assert (graphed.capture.captures, graphed.capture.replays) == (1, 3)
    for a, b in zip(graphed.model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b)


def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> list[Tensor]:
    """Trains one step with gradients of two passes added up, and of the input."""
    optimizer.zero_grad()
    for k in range(2):
        (model(x * (k + 1))["y"].square().sum() * (k + 1)).backward()
    gradients = [
        p.grad.clone() for group in optimizer.param_groups for p in group["params"]
    ]
    optimizer.step()
    assert x.grad is not None
    return [*gradients, x.grad]


def test_training_is_what_it_is_without_graphs() -> None:
    plain, graphed = pair()
    optimizers = [
        torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)
        for m in (plain, graphed.model)
    ]
    for _ in range(4):
        x = images()
        mine, theirs = (x.clone().requires_grad_() for _ in range(2))
        found = step(graphed, optimizers[1], mine)
        expected = step(plain, optimizers[0], theirs)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    assert graphed.capture.captures == 2
    assert graphed.model.runs == EAGER_STEPS + 1
    state = plain.state_dict()
    for name, value in graphed.model.state_dict().items():
        torch.testing.assert_close(value, state[name])


def replaced(model: nn.Module) -> None:
    model.one.weight = nn.Parameter(torch.ones_like(model.one.weight))


def moved(model: nn.Module) -> None:
    model.one.weight.data = model.one.weight.data * 2


CHANGES: dict[str, tuple[Change, bool]] = {
    "a parameter is replaced": (replaced, True),
    "a parameter has other memory": (moved, True),
    "evaluation": (nn.Module.eval, True),
    "a norm alone is in evaluation": (lambda m: m.norm.eval(), True),
    "a frozen parameter": (lambda m: m.one.weight.requires_grad_(False), True),
    "values are loaded": (lambda m: m.load_state_dict(Net().state_dict()), False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_a_graph_would_not_see_captures_anew(name: str) -> None:
    (change, is_captured_again), (plain, graphed) = CHANGES[name], pair()
    x = images()
    warm(graphed, x)
    change(graphed.model)
    plain.load_state_dict(graphed.model.state_dict())
    plain.train(graphed.model.training)
    plain.norm.train(graphed.model.norm.training)
    runs = graphed.model.runs
    for _ in range(EAGER_STEPS + 2):
        torch.testing.assert_close(graphed(x)["y"], plain(x)["y"])
    new_runs = EAGER_STEPS + 1 if is_captured_again else 0
    assert graphed.model.runs - runs == new_runs


def test_modes_that_take_turns_are_captured_for_themselves() -> None:
    """As where two networks are trained against each other."""
    _, graphed = pair()
    weight, x = graphed.model.one.weight, images()
    for turn in range(2 * EAGER_STEPS + 4):
        weight.requires_grad_(turn % 2 == 0)
        graphed(x)
    assert graphed.model.runs == 2 * (EAGER_STEPS + 1)


@pytest.mark.parametrize("other", ["shape", "dtype", "strides", "gradient", "scale"])
def test_another_signature_is_captured_for_itself(other: str) -> None:
    _, graphed = pair()
    graphed.model.eval()
    x = images()
    changed = {
        "shape": images(3),
        "dtype": x.to(torch.bfloat16),
        "strides": x.contiguous(memory_format=torch.channels_last),
        "gradient": x.clone().requires_grad_(),
        "scale": x,
    }[other]
    scale = 2.0 if other == "scale" else 1.0
    warm(graphed, x)
    with torch.autocast("cpu", enabled=other == "dtype"):
        runs = graphed.model.runs
        expected = graphed.model.forward(changed, scale)["y"]
        for _ in range(EAGER_STEPS + 2):
            torch.testing.assert_close(graphed(changed, scale)["y"], expected)
    assert graphed.model.runs - runs == 1 + EAGER_STEPS + 1


def test_modes_are_of_the_signature() -> None:
    _, graphed = pair()
    graphed.model.eval()
    x = images()
    modes = [
        torch.no_grad(),
        torch.inference_mode(),
        torch.enable_grad(),
        torch.autocast("cpu"),
    ]
    for mode in modes:
        runs = graphed.model.runs
        with mode:
            for _ in range(EAGER_STEPS + 2):
                torch.testing.assert_close(graphed(x), graphed.model.forward(x))
        assert graphed.model.runs - runs == 2 * EAGER_STEPS + 3


def test_weights_are_cast_anew_under_autocast() -> None:
    _, graphed = pair()
    graphed.model.eval()
    x = images()
    with torch.no_grad(), torch.autocast("cpu"):
        warm(graphed, x)
        graphed.model.two.weight.mul_(2)
        torch.clear_autocast_cache()
        torch.testing.assert_close(graphed(x), graphed.model.forward(x))


def test_graphs_of_the_last_signatures_are_kept() -> None:
    _, graphed = pair()
    with torch.no_grad():
        for n in range(1, MAX_SIGNATURES + 2):
            warm(graphed, images(n))
        runs = graphed.model.runs
        graphed(images(2))
        assert graphed.model.runs == runs
        graphed(images(1))
        assert graphed.model.runs == runs + 1


def test_a_forward_runs_eagerly_while_another_ones_backward_may_come() -> None:
    plain, graphed = pair()
    plain.eval(), graphed.model.eval()
    warm(graphed, images())
    a, b = images(), images()
    graphed.model.zero_grad()
    runs = graphed.model.runs
    first, second = graphed(a)["y"], graphed(b)["y"]
    assert graphed.model.runs == runs + 1
    (first * second).sum().backward()
    (plain(a)["y"] * plain(b)["y"]).sum().backward()
    for p, q in zip(graphed.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    graphed(a)  # whose backward cannot come any more
    graphed(b)
    assert graphed.model.runs == runs + 1


def test_a_second_backward_is_refused() -> None:
    _, graphed = pair()
    warm(graphed, images())
    y = graphed(images())["y"].sum()
    y.backward(retain_graph=True)
    with pytest.raises(HetConvError, match="second backward"):
        y.backward()


def test_results_and_gradients_are_copies() -> None:
    _, graphed = pair()
    warm(graphed, images())
    y = graphed(images())["y"]
    y.sum().backward()
    weight = graphed.model.one.weight
    kept = y.clone(), weight.grad.clone()
    again = graphed(images())["y"]
    torch.autograd.grad(again.sum(), weight)
    assert torch.equal(y, kept[0])
    assert torch.equal(weight.grad, kept[1])


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
