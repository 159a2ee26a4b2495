"""Every module of PyTorch's own database between two layers that are cut, against the
same model on one device.

A case is a module, one of its sample inputs, training or evaluation, and a kind of split.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import hetconv
from hetconv.sharding.split import Split, SplitKind
from tests.equivalence import full_gradients
from tests.nets import operator_of, plan_of, split_of

from .survey import Result, in_step

KINDS: tuple[SplitKind, ...] = ("height", "filter", "channel", "sample")
RATIO = (2, 1)
TOLERANCE = 1e-9
CHANNELS = 3  # of the model's input and output
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Case(NamedTuple):
    """``sample``: constructor and forward arguments, as PyTorch's database has them."""

    sample: Any
    training: bool
    kind: SplitKind


@cache
def modules() -> list[Any]:
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


def names() -> list[str]:
    return [str(info.name) for info in modules()]


def takes_floats(sample: Any) -> bool:
    """Whether the first argument is a tensor that a layer before the module can
    compute: some samples are NaN.
    """
    first = next(
        iter((*sample.forward_input.args, *sample.forward_input.kwargs.values())), None
    )
    return (
        isinstance(first, Tensor)
        and first.is_floating_point()
        and first.numel() > 0
        and bool(first.isfinite().all())
    )


def cases_of(info: Any, most: int) -> list[Case]:
    """Of some of a module's samples, spread over all of them: every kind of split in
    training and in evaluation.
    """
    found = []
    for training in (True, False):
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            every = info.module_inputs_func(
                info,
                str(torch.get_default_device()),
                torch.float64,
                requires_grad=False,
                training=training,
            )
            fit = [s for s in every if takes_floats(s)]
        step = max(len(fit) / most, 1)
        chosen = [fit[int(i * step)] for i in range(min(most, len(fit)))]
        found += [
            Case(s, training, kind) for s, kind in itertools.product(chosen, KINDS)
        ]
    return found


def number_of_cases(index: int, most: int) -> int:
    return len(cases_of(modules()[index], most))


def run_cases(
    index: int, most: int, start: int, stop: int
) -> tuple[list[Result], bool]:
    """Results of the cases of one module on this rank, and whether ranks went apart at
    the last of them.
    """
    torch.set_default_dtype(torch.float64)
    info = modules()[index]
    cases = cases_of(info, most)[start:stop]
    return in_step(start, [lambda case=case: _outcome(info, case) for case in cases])


class Between(nn.Module):
    """A module between two layers. What it is given has the shape and the range of ``like``."""

    def __init__(self, module: nn.Module, like: Tensor):
        super().__init__()
        self.shape, self.low, self.high = (
            tuple(like.shape),
            float(like.min()),
            float(like.max()),
        )
        self.ahead, self.module = _layer(self.shape, ahead=True), module
        self.after: nn.Module | None = None

    def input(self) -> Tensor:
        if isinstance(self.ahead, nn.Linear):
            return torch.randn(self.shape[0], CHANNELS)
        if 3 <= len(self.shape) <= 5:
            return torch.randn(self.shape[0], CHANNELS, *self.shape[2:])
        return torch.randn(1, CHANNELS, prod(self.shape))

    def given(self, x: Tensor) -> Tensor:
        y = self.ahead(x)
        if tuple(y.shape) != self.shape:
            y = y[0, 0] if len(self.shape) == 1 else y.reshape(self.shape)
        return y.sigmoid() * ((self.high - self.low) or 1e-4) + self.low

    def forward(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        y = self.given(x)
        if args:
            result = self.module(y, *args[1:], **kwargs)
        else:
            result = self.module(**{**kwargs, next(iter(kwargs)): y})
        return result if self.after is None else (self.after(_first(result)), result)


def _first(result: Any) -> Tensor:
    return next(y for y in tree_leaves(result) if isinstance(y, Tensor))


def _layer(shape: tuple[int, ...], ahead: bool) -> nn.Module:
    """A layer before or after a tensor of this shape."""
    if len(shape) == 2:
        return nn.Linear(CHANNELS, shape[1]) if ahead else nn.Linear(shape[1], CHANNELS)
    if 3 <= len(shape) <= 5:
        conv = CONVS[len(shape) - 3]
        return (
            conv(CHANNELS, shape[1], 3, padding=1)
            if ahead
            else conv(shape[1], CHANNELS, 3, padding=1)
        )
    return nn.Conv1d(CHANNELS, 1, 3, padding=1)


def _split(layer: nn.Module, kind: SplitKind) -> Split:
    op = operator_of(layer)
    assert op is not None
    return split_of(
        op,
        "width" if kind == "height" and isinstance(layer, nn.Conv1d) else kind,
        RATIO,
    )


def _model(info: Any, case: Case) -> Between:
    made, call = case.sample.constructor_input, case.sample.forward_input
    torch.manual_seed(0)
    module = info.module_cls(*made.args, **made.kwargs).double().train(case.training)
    model = Between(module, next(iter((*call.args, *call.kwargs.values()))))
    with torch.no_grad():
        first = _first(
            model(model.input(), call.args, call.kwargs)
        )  # lazy modules take their shapes from it
    if 2 <= first.dim() <= 5 and first.is_floating_point() and first.numel():
        model.after = _layer(tuple(first.shape), ahead=False)
    return model


def _parallel(model: Between, kind: SplitKind) -> nn.Module:
    layers = {"ahead": model.ahead} | (
        {"after": model.after} if model.after is not None else {}
    )
    splits = {name: _split(layer, kind) for name, layer in layers.items()}
    return hetconv.parallelize(model, plan_of(model, splits, len(RATIO)))


def _outcome(info: Any, case: Case) -> tuple[str, str]:
    call = case.sample.forward_input
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = _model(info, case)
        cut = _parallel(copy.deepcopy(plain), case.kind)
        torch.manual_seed(4)
        x = plain.input()
        by_chance = _differing(
            _run(copy.deepcopy(plain), x, call, 3),
            _run(copy.deepcopy(plain), x, call, 2),
            True,
        )
        expected = _run(plain, x, call, 2)
        try:
            result = _run(cut, x, call, 2)
        except Exception as e:
            return "raised", f"{case.sample.desc} {type(e).__name__}: {str(e)[:300]}"
    said = _differing(result, expected, values=not by_chance)
    return (
        ("wrong", f"{case.sample.desc} {case.kind} training {case.training}: {said}")
        if said
        else ("right", "")
    )


def _run(model: nn.Module, x: Tensor, call: Any, seed: int) -> dict[str, Any]:
    """Results, gradients and state of one step."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    results = [
        y
        for y in tree_leaves(model(x, call.args, call.kwargs))
        if isinstance(y, Tensor)
    ]
    found: dict[str, Any] = {f"result {i}": y for i, y in enumerate(results)}
    generator = torch.Generator(x.device).manual_seed(7)
    weighted = [
        (y * torch.randn(y.shape, generator=generator)).sum()
        for y in results
        if y.requires_grad
    ]
    if weighted:
        torch.stack(weighted).sum().backward()
    found["input's gradient"] = x.grad
    found |= {f"gradient of {name}": g for name, g in full_gradients(model).items()}
    return found | {
        f"state {name}": value for name, value in hetconv.full_state_dict(model).items()
    }


def _differing(found: dict[str, Any], expected: dict[str, Any], values: bool) -> str:
    """What differs first: a type, a shape or, if asked for, a value."""
    if list(found) != list(expected):
        return f"{list(found)}, expected {list(expected)}"
    for name, a in found.items():
        b = expected[name]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if (a is None) != (b is None) and float(
                torch.as_tensor(a if b is None else b).abs().max()
            ) > 0:
                return f"{name}: {a}, expected {b}"
        elif type(a.detach()) is not Tensor or a.shape != b.shape or a.dtype != b.dtype:
            return (
                f"{name}: {type(a).__name__} {tuple(a.shape)} {a.dtype}, expected "
                f"{tuple(b.shape)} {b.dtype}"
            )
        elif values and b.numel():
            largest = (
                max(float(b.detach().abs().nan_to_num(posinf=0).max()), 1.0)
                if b.is_floating_point()
                else 1.0
            )
            if not torch.allclose(
                a.detach(), b.detach(), rtol=0, atol=TOLERANCE * largest, equal_nan=True
            ):
                return (
                    f"{name} differs by {float((a.detach() - b.detach()).abs().max())}"
                )
    return ""
