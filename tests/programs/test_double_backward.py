"""Gradients of gradients, as penalties have them (WGAN-GP, R1, path length), under
every kind of split.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hetconv
from hetconv.sharding.split import Split, SplitKind
from tests.equivalence import Differences, apart, assert_same, full_gradients
from tests.nets import plan_of
from tests.spawn import on_ranks


def critic(norm: str) -> nn.Module:
    norms: dict[str, Callable[[], nn.Module]] = {
        "batch": lambda: nn.BatchNorm2d(8),
        "group": lambda: nn.GroupNorm(2, 8),
        "instance": lambda: nn.InstanceNorm2d(8),
        "layer": lambda: nn.LayerNorm([8, 9, 7]),
        "none": nn.Identity,
    }
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        norms[norm](),
        nn.Softplus(),
        nn.Conv2d(8, 6, 5, stride=2, padding=2, groups=2),
        nn.Tanh(),
        nn.Conv2d(6, 4, 3, padding=(2, 0)),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 3 * 1, 5),
        nn.Softplus(),
        nn.Linear(5, 1),
    )


SPLITS: dict[SplitKind, Callable[[int], dict[str, Split]]] = {
    "sample": lambda world: dict.fromkeys("0358", Split("sample", (2, 1, 0)[:world])),
    "height": lambda world: dict.fromkeys("035", Split("height", (2, 1, 1)[:world])),
    "width": lambda world: dict.fromkeys("035", Split("width", (3, 1, 0)[:world])),
    "filter": lambda world: {
        "0": Split("filter", (5, 3, 0)[:world]),
        "3": Split("filter", (4, 2, 0)[:world]),
        "5": Split("filter", (1, 3, 0)[:world]),
        "8": Split("filter", (4, 1, 0)[:world]),
    },
    "channel": lambda world: {
        "0": Split("channel", (2, 1, 0)[:world]),
        "3": Split("channel", (4, 4, 0)[:world]),
        "5": Split("channel", (4, 2, 0)[:world]),
        "8": Split("channel", (5, 7, 0)[:world]),
    },
}


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """As WGAN-GP has it, with the loss that it is added to."""
    y = model(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + ((g.flatten(1).norm(dim=1) - 1) ** 2).mean()


def penalised(kind: SplitKind, norm: str, world: int, again: bool) -> Differences:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    serial = critic(norm)
    cut = hetconv.parallelize(
        copy.deepcopy(serial), plan_of(serial, SPLITS[kind](world), world)
    )
    x, found = torch.randn(3, 3, 9, 7), dict[str, Tensor | None]()
    inputs = []
    for model in (cut, serial):
        inputs.append(x.clone().requires_grad_())
        loss = penalty(model, inputs[-1])
        if again:  # the gradient of the penalty's own gradient
            (g,) = torch.autograd.grad(loss, inputs[-1], create_graph=True)
            loss = loss + g.square().sum()
        loss.backward()
        found[f"loss {len(inputs)}"] = loss.detach()
    gradients = full_gradients(cut)
    scale = {
        n: max(float(p.grad.abs().max()), 1.0)
        for n, p in serial.named_parameters()
        if p.grad is not None
    }
    return {
        "loss": apart(found["loss 1"], found["loss 2"]),
        "input": apart(inputs[0].grad, inputs[1].grad),
        **{
            n: apart(gradients[n], p.grad) / scale.get(n, 1.0)
            for n, p in serial.named_parameters()
        },
    }


@pytest.mark.parametrize("norm", ["none", "batch", "group", "instance", "layer"])
@pytest.mark.parametrize("kind", SPLITS)
def test_a_gradient_penalty(kind: SplitKind, norm: str) -> None:
    assert_same(on_ranks(2, penalised, kind, norm, 2, False))


@pytest.mark.parametrize("kind", SPLITS)
def test_on_three_ranks(kind: SplitKind) -> None:
    assert_same(on_ranks(3, penalised, kind, "batch", 3, False))


@pytest.mark.parametrize("kind", SPLITS)
def test_gradients_of_gradients_of_gradients(kind: SplitKind) -> None:
    assert_same(on_ranks(2, penalised, kind, "none", 2, True))


def threads_of_backward_passes() -> list[bool]:
    """Whether PyTorch may run a backward pass in another thread, before and after a
    call of a model in a new one.
    """
    model = critic("none")
    cut = hetconv.parallelize(model, plan_of(model, SPLITS["height"](2), 2))
    found = []

    def call() -> None:
        found.append(torch._C._is_multithreading_enabled())
        cut(torch.randn(2, 3, 9, 7))
        found.append(torch._C._is_multithreading_enabled())

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found


def test_backward_passes_run_in_the_thread_that_starts_them() -> None:
    """PyTorch numbers nodes in each thread by themselves: those of a GPU's thread would
    come in no certain order.
    """
    assert on_ranks(2, threads_of_backward_passes) == [[True, False]] * 2
