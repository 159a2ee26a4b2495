"""Capture with any arguments, of models that read numbers, and the model afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import hetconv
from hetconv.tracing.graph import Graph

X = torch.zeros(2, 3, 8, 6)
SEEN: list[Tensor] = []  # what a hook keeps at the top of a file


@lru_cache(maxsize=4)
def ramp(n: int) -> Tensor:
    return torch.linspace(0, 1, n)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


class KeepsATable(Net):
    """Keeps a table for the first size in an attribute, a list, a dict and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.tables: list[Tensor] = []
        self.by_size: dict[int, Tensor] = {}
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[-1], dtype=x.dtype)
            self.tables.append(self.table * 2)
            self.by_size[x.shape[-1]] = self.table * 3
            self.mask = torch.ones_like(self.table)
            self.ema = nn.Parameter(self.table * 4)
        y: Tensor = super().forward(x)
        return (
            y
            + self.table
            + self.by_size[x.shape[-1]] * self.mask
            + ramp(x.shape[-1])
            + self.ema
        )


class Reads(Net):
    """A number decides what is called, and the first call sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor(0))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        if self.ready.item() == 0:
            with torch.no_grad():
                self.scale.data.mul_(2 + random.random() + float(torch.rand(())))
                self.ready.fill_(1)
            y = y * self.scale
        return y


class Options(nn.Module):
    """Takes the arguments of a diffusion model."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.time, self.text = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Linear(5, 4),
            nn.Linear(7, 4),
        )

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        *,
        cond: dict[str, list[Tensor]],
        scale: float = 1.0,
        mask: Any = None,
        return_dict: bool = True,
    ) -> Any:
        y = self.conv(x) + self.time(timestep)[:, :, None, None] * scale
        y = y + sum(self.text(c) for c in cond["text"])[:, :, None, None]
        return {"sample": y} if return_dict else (y,)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Returns the objects that a model's modules and their containers hold, by name."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found[f"{path}.{name}"] = value
            if isinstance(value, dict):
                found |= {
                    f"{path}.{name}[{key!r}]": item for key, item in value.items()
                }
            elif isinstance(value, list):
                found |= {f"{path}.{name}[{i}]": item for i, item in enumerate(value)}
    return found


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: t.detach().clone()
        for name, t in (*model.named_parameters(), *model.named_buffers())
    }


def assert_as_it_was(model: nn.Module, run: Callable[[], Any]) -> Any:
    """Returns the result of ``run``, and checks model and random states afterwards."""
    objects, values = state_of(model), values_of(model)
    states = torch.get_rng_state(), random.getstate()
    try:
        return run()
    finally:
        after = state_of(model)
        assert after.keys() == objects.keys()
        assert [name for name in objects if after[name] is not objects[name]] == []
        assert all(torch.equal(t, values[name]) for name, t in values_of(model).items())
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]


def test_what_a_model_keeps_for_its_first_input_is_removed() -> None:
    model = KeepsATable()
    graph = assert_as_it_was(model, lambda: hetconv.capture(model, X))
    assert ramp.cache_info().currsize == 0
    y = model(X)
    assert type(y) is Tensor
    assert not any(
        isinstance(t, FakeTensor)
        for t in (model.table, *model.tables, *model.by_size.values(), model.ema)
    )
    assert (
        assert_as_it_was(model, lambda: hetconv.capture(model, X)).layers
        == graph.layers
    )


def test_what_hooks_keep_is_what_they_kept() -> None:
    model, kept, last = Net(), {"before": X}, None

    def note(module: nn.Module, args: Any, y: Tensor) -> None:
        nonlocal last
        kept["conv"], last = y, y
        SEEN.append(y)

    model.conv.register_forward_hook(note)
    graph = assert_as_it_was(model, lambda: hetconv.capture(model, X))
    assert (list(kept), last, SEEN) == (["before"], None, [])
    assert list(graph.layers) == ["conv"]


def test_a_run_that_raises_leaves_the_model_as_it_was() -> None:
    model = KeepsATable()
    with pytest.raises(
        hetconv.HetConvError, match=r"KeepsATable could not be captured on .*2, 5, 8, 6"
    ):
        assert_as_it_was(model, lambda: hetconv.capture(model, torch.zeros(2, 5, 8, 6)))
    with pytest.raises(
        hetconv.HetConvError, match="Module or a method of one, but was given 3"
    ):
        hetconv.capture(3, X)  # type: ignore[arg-type]


@pytest.mark.filterwarnings(
    "ignore:Reads was run for real"
)  # PyTorch 2.14 has fake tensors that know small numbers
def test_a_flag_that_is_read_decides_as_it_does_in_the_model() -> None:
    model = Reads()
    graph = assert_as_it_was(model, lambda: hetconv.capture(model, X))
    assert [node.function for node in graph.nodes] == ["conv2d", "relu", "mul"]
    model.ready.fill_(1)
    later: Graph = hetconv.capture(model, X)
    assert [node.function for node in later.nodes] == ["conv2d", "relu"]
    assert [node.op for node in later.nodes] == [
        node.op for node in hetconv.capture(Net(), X).nodes
    ]


def test_a_run_that_reads_numbers_of_its_input_is_made_for_real_on_copies() -> None:
    class Asks(Reads):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if x.sum().item() > 0 else y * 2

    model, x = Asks(), torch.ones_like(X)
    with pytest.warns(
        UserWarning,
        match="Asks was run for real, on copies, to be captured.*DataDependentOutput",
    ):
        graph = assert_as_it_was(model, lambda: hetconv.capture(model, x))
    assert [node.function for node in graph.nodes] == ["conv2d", "relu", "mul", "sum"]
    assert bool((x == 1).all())


def test_losses_and_flags_that_fake_tensors_cannot_tell() -> None:
    class Loss(Net):
        def forward(self, x: Tensor, var: Tensor) -> Tensor:
            y = super().forward(x)
            return F.gaussian_nll_loss(y, torch.zeros_like(y), var.expand_as(y))

    model = Loss()
    with pytest.warns(UserWarning, match="Loss was run for real"):
        graph = assert_as_it_was(
            model, lambda: hetconv.capture(model, X, torch.ones(1, 1, 1, 1))
        )
    assert list(graph.layers) == ["conv"]


def test_any_arguments_that_a_model_takes() -> None:
    model, t, texts = (
        Options(),
        torch.zeros(2, 5, requires_grad=True),
        [torch.zeros(2, 7), torch.zeros(2, 7)],
    )
    graph = hetconv.capture(
        model,
        X,
        timestep=t,
        cond={"text": texts},
        scale=0.5,
        mask=None,
        return_dict=False,
    )
    shapes = [
        (graph.values[i].shape, graph.values[i].requires_grad) for i in graph.inputs
    ]
    assert shapes == [
        ((2, 3, 8, 6), False),
        ((2, 5), True),
        ((2, 7), False),
        ((2, 7), False),
    ]
    assert list(graph.layers) == ["conv", "time", "text"]
    assert len(graph.outputs) == 1
    again = hetconv.capture(model, X, t, cond={"text": texts}, scale=0.5)
    assert again.digest == graph.digest


def test_a_method_of_a_module_is_captured_as_the_module_is() -> None:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ahead, self.back = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3)

        def decode(self, z: Tensor) -> Tensor:
            y: Tensor = self.back(z)
            return y

    graph = hetconv.capture(Coder().decode, torch.zeros(1, 4, 8, 8))
    assert (graph.model, list(graph.layers)) == ("Coder", ["back"])
