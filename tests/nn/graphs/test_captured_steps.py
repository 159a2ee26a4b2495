"""Captured steps: when a step is captured and replayed, and when it runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetconv.errors import HetConvError
from hetconv.nn.step_graphs import EAGER_STEPS, MAX_SIGNATURES
from tests.nn.graphs.graphed import Net, images, pair, warm

Change = Callable[[nn.Module], object]


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
