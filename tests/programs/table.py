"""A table of programs, each run on one device and on two unequal ranks; what both note is compared.

A program is a function of a `Run`: it makes its models, gives those that are split to
`Run.parallel`, trains as ordinary code does, and notes what matters. To add one, write
it in a test file and decorate it::

    PROGRAMS = Table()

    @PROGRAMS.program
    def my_program(run: Run) -> None:
        model = run.parallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            run.note("loss", loss := model(run.images()).square().mean())
            loss.backward()
            optimizer.step()
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import hetconv
from hetconv.operators.layers import plannable_layers
from hetconv.sharding.split import SplitKind
from tests.equivalence import Differences, apart, full_gradients
from tests.nets import operator_of, plan_of, split_of
from tests.spawn import on_ranks

PLACES: dict[str, tuple[SplitKind, tuple[int, int]]] = {
    "height": ("height", (2, 1)),
    "filter": ("filter", (2, 1)),
    "channel": ("channel", (2, 1)),
    "sample": ("sample", (2, 1)),
    "height on one": ("height", (0, 1)),
    "filter on one": ("filter", (1, 0)),
}
"""How the ranks share each layer; some have one without a share."""
TOLERANCE = 1e-9
"""Of the largest number of a tensor."""


class Net(nn.Module):
    """Features and a head, as classifiers have them."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3, stride=2, padding=1),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
        )
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 3, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.body(z)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False),
            nn.InstanceNorm2d(8, affine=True),
            nn.Softplus(),
        )
        self.score = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.body(x).mean((2, 3)))


class Run:
    """One run of a program: on one device if ``place`` is None, else with every layer
    that can be cut cut so.
    """

    def __init__(self, place: str | None):
        self.place = place
        self.noted: list[tuple[str, Tensor | None]] = []
        self._models: list[tuple[str, nn.Module]] = []
        self._draw = torch.Generator(torch.get_default_device()).manual_seed(1)

    @property
    def split(self) -> bool:
        return self.place is not None

    def parallel(self, model: nn.Module, name: str = "model") -> nn.Module:
        """The model, parallelized in a run on ranks; its state is compared at the end."""
        if self.place is not None:
            kind, ratio = PLACES[self.place]
            ops = {
                path: operator_of(layer)
                for path, layer in plannable_layers(model).items()
            }
            splits = {
                path: split_of(op, kind, ratio)
                for path, op in ops.items()
                if op is not None
            }
            assert splits
            model = hetconv.parallelize(model, plan_of(model, splits, len(ratio)))
        return self.watched(model, name)

    def watched(self, model: nn.Module, name: str) -> nn.Module:
        """A model of which the state is compared at the end, such as a copy of a
        parallelized one.
        """
        self._models.append((name, model))
        return model

    def images(self, samples: int = 3) -> Tensor:
        return torch.randn(samples, 3, 9, 7, generator=self._draw)

    def labels(self, samples: int = 3, classes: int = 4) -> Tensor:
        return torch.randint(classes, (samples,), generator=self._draw)

    def note(self, what: str, value: Any) -> None:
        """Keeps the tensors in ``value`` as they are now."""
        for x in tree_leaves(value):
            x = torch.as_tensor(
                x, dtype=None if isinstance(x, Tensor) else torch.float64
            )
            assert type(x.detach()) is Tensor, f"{what} is a {type(x).__name__}"
            self.noted.append((what, x.detach().clone()))

    def note_gradients(self, model: nn.Module) -> None:
        found = (
            full_gradients(model)
            if self.split
            else {n: p.grad for n, p in model.named_parameters()}
        )
        self.noted += [
            (f"gradient {n}", None if g is None else g.clone())
            for n, g in found.items()
        ]

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        if self.split:
            return hetconv.clip_grad_norm_(model, max_norm)
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def scaler(self, model: nn.Module, **options: Any) -> torch.amp.GradScaler:
        kind = torch.get_default_device().type
        return (
            hetconv.GradScaler(model, kind, **options)
            if self.split
            else torch.amp.GradScaler(kind, **options)
        )

    def finish(self) -> None:
        for name, model in self._models:
            state = hetconv.full_state_dict(model) if self.split else model.state_dict()
            self.noted += [(f"{name} {k}", v) for k, v in state.items()]


Program = Callable[[Run], None]


def differences(program: Program, place: str) -> Differences:
    """Of all that a program notes on parts from what it notes on one device, relative
    to the largest number.
    """
    torch.set_default_dtype(torch.float64)
    runs = Run(place), Run(None)
    for run in runs:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # of torch.nn.utils.weight_norm
            program(run)
        run.finish()
    found: Differences = {}
    mine, theirs = (run.noted for run in runs)
    assert [what for what, _ in mine] == [what for what, _ in theirs]
    for i, ((what, a), (_, b)) in enumerate(zip(mine, theirs, strict=True)):
        if a is not None and b is not None and a.dtype != b.dtype:
            found[f"{i} {what}: {a.dtype}, expected {b.dtype}"] = float("inf")
        largest = float(b.abs().max()) if b is not None and b.numel() else 0.0
        found[f"{i} {what}"] = apart(a, b) / max(largest, 1e-3)
    return found


class Table:
    """Programs by name, and the test that runs them all."""

    def __init__(self) -> None:
        self.programs: dict[str, Program] = {}

    def program(self, program: Program) -> Program:
        self.programs[program.__name__] = program
        return program

    def test(self) -> Callable[..., None]:
        @pytest.mark.parametrize("place", PLACES)
        @pytest.mark.parametrize("name", self.programs)
        def test_a_program_gives_what_it_gives_on_one_device(
            name: str, place: str
        ) -> None:
            found = on_ranks(2, differences, self.programs[name], place)
            assert found[0]
            wrong = [
                {k: v for k, v in of_one.items() if not v <= TOLERANCE}
                for of_one in found
            ]
            assert not any(wrong), wrong

        return test_a_program_gives_what_it_gives_on_one_device
