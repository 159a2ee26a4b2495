"""Every operator of PyTorch's own database, on tensors in parts against plain tensors.

A case is an operator, one of its sample inputs, a way of calling it, and a layout for
each tensor among its arguments.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import hetconv
from hetconv.comm.rank_group import rank_group_of
from hetconv.runtime.het_tensor import HetTensor
from hetconv.sharding.layout import Layout
from tests.placed import full_gradient, layouts_of, placed, summands, value

from .survey import Result, in_step

TOLERANCE = 1e-9
MOST_NUMBERS = 4096  # of an argument; larger samples say nothing more
UNPREDICTABLE = (
    "rrelu",
    "dropout",
    "rand",
    "bernoulli",
    "normal",
    "multinomial",
    "uniform",
    "cauchy",
    "exponential",
    "geometric",
    "empty",
)
"""Of which the values are drawn, or not set at all: shapes and dtypes are compared alone."""


class Case(NamedTuple):
    """``sample`` and ``way`` of calling; ``layouts`` of the tensors among the
    arguments, None for a plain one.
    """

    sample: int
    way: str
    layouts: tuple[Layout | None, ...]
    refused: bool = False


@dataclass(frozen=True)
class Sample:
    """Arguments as PyTorch's database has them, flat: ``leaves`` with the tensors at ``at``."""

    leaves: list[Any]
    tree: Any
    at: tuple[int, ...]

    @staticmethod
    def of(input: Any, args: Any, kwargs: Any) -> Sample:
        leaves, tree = tree_flatten(((input, *args), dict(kwargs)))
        return Sample(
            leaves,
            tree,
            tuple(i for i, x in enumerate(leaves) if isinstance(x, Tensor)),
        )

    @property
    def tensors(self) -> list[Tensor]:
        return [self.leaves[i] for i in self.at]

    def called_with(
        self, tensors: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self.leaves)
        for i, x in zip(self.at, tensors, strict=True):
            leaves[i] = x
        args, kwargs = tree_unflatten(leaves, self.tree)
        return args, kwargs


@cache
def operators() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def names() -> list[str]:
    return [op.formatted_name for op in operators()]


def dtype_of(op: Any) -> torch.dtype | None:
    return next(
        (
            d
            for d in (torch.float64, torch.int64, torch.bool, torch.complex128)
            if d in op.dtypes
        ),
        None,
    )


def samples_of(op: Any, most: int) -> list[Sample]:
    """Some of its sample inputs, spread over all of them."""
    dtype = dtype_of(op)
    if dtype is None:
        return []
    torch.manual_seed(1)
    random.seed(1)
    grad = dtype in (torch.float64, torch.complex128) and op.supports_autograd
    found = []
    for s in itertools.islice(
        op.sample_inputs(str(torch.get_default_device()), dtype, requires_grad=grad),
        200,
    ):
        one = Sample.of(s.input, s.args, s.kwargs)
        if one.at and all(
            x.layout == torch.strided and x.numel() <= MOST_NUMBERS for x in one.tensors
        ):
            found.append(one)
    step = max(len(found) / most, 1)
    return [found[int(i * step)] for i in range(min(most, len(found)))]


def errors_of(op: Any, most: int) -> list[Sample]:
    """Arguments that PyTorch refuses."""
    if op.error_inputs_func is None:
        return []
    torch.manual_seed(1)
    found = []
    for e in op.error_inputs(str(torch.get_default_device())):
        s = e.sample_input
        one = Sample.of(s.input, s.args, s.kwargs)
        if one.at and all(
            x.layout == torch.strided and x.numel() <= MOST_NUMBERS for x in one.tensors
        ):
            found.append(one)
    return found[:most]


def cases_of(op: Any, world: int, most: int) -> tuple[list[Sample], list[Case]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples, refused = samples_of(op, most), errors_of(op, most)
    draw, cases = random.Random(op.formatted_name), []
    ways = ["function", "written after"]
    if op.method_variant is not None:
        ways.append("method")
    if op.inplace_variant is not None:
        ways.append("in place")
    if op.supports_out:
        ways += ["out", "wrong out"]
    for i, s in enumerate(samples + refused):
        each = [layouts_of(x, world) for x in s.tensors]
        chosen: list[tuple[Layout | None, ...]] = []
        for k, layouts in enumerate(each):
            chosen += [
                (*(None,) * k, layout, *(None,) * (len(each) - k - 1))
                for layout in layouts
            ]
        if len(each) > 1:
            chosen += [
                tuple(draw.choice(layouts) for layouts in each) for _ in range(4)
            ]
        for n, layouts in enumerate(chosen):
            if i >= len(samples):
                cases.append(Case(i, "function", layouts, refused=True))
                continue
            cases.append(Case(i, ways[(n + i) % len(ways)], layouts))
            if cases[-1].way != "function":
                cases.append(Case(i, "function", layouts))
    return samples + refused, cases


def run_cases(
    index: int, most: int, start: int, stop: int
) -> tuple[list[Result], bool]:
    """Results of the cases of one operator on this rank, and whether ranks went apart
    at the last of them.
    """
    op = operators()[index]
    samples, cases = cases_of(op, dist.get_world_size(), most)

    def run(case: Case) -> tuple[str, str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _outcome(op, samples[case.sample], case)

    return in_step(start, (partial(run, case) for case in cases[start:stop]))


def number_of_cases(index: int, world: int, most: int) -> int:
    return len(cases_of(operators()[index], world, most)[1])


def _outcome(op: Any, sample: Sample, case: Case) -> tuple[str, str]:
    random_values = any(word in op.name for word in UNPREDICTABLE)
    try:
        expected: Any = _run(op, sample, case, split=False)
    except Exception as e:
        expected = e
    try:
        result: Any = _run(op, sample, case, split=True)
    except Exception as e:
        if isinstance(expected, Exception):
            same = type(e) is type(expected) or isinstance(e, hetconv.HetConvError)
            return (
                ("right", "")
                if same
                else (
                    "wrong",
                    f"raised {e!r:.150}, where torch raises {expected!r:.150}",
                )
            )
        return "raised", f"{type(e).__name__}: {str(e)[:300]}"
    if isinstance(expected, Exception):
        return "wrong", f"did not raise, as torch does: {expected!r:.200}"
    for name, a, b in zip(
        ("results", "arguments", "gradients"), result, expected, strict=True
    ):
        if len(a) != len(b):
            return "wrong", f"{name}: {len(a)} tensors, {len(b)} expected"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if said := _differs(x, y, random_values):
                return "wrong", f"{name} {i}: {said}"
    return "right", ""


def _differs(x: Any, y: Any, random_values: bool) -> str:
    if not isinstance(y, Tensor) or not isinstance(x, Tensor):
        same = x is y or (type(x) is type(y) and (x == y or random_values or x != x))
        return "" if same else f"{x!r:.60}, expected {y!r:.60}"
    if isinstance(x, HetTensor):
        if tuple(x.size()) != tuple(x.shape):
            return f"shape {tuple(x.shape)} and size {tuple(x.size())}"
        x = hetconv.gather(x)
    if x.shape != y.shape or x.dtype != y.dtype or x.layout != y.layout:
        return (
            f"{tuple(x.shape)} {x.dtype} {x.layout}, expected {tuple(y.shape)} {y.dtype} "
            f"{y.layout}"
        )
    if random_values or not y.numel():
        return ""
    x, y = (
        t.detach().resolve_conj().to_dense()
        if t.layout != torch.strided
        else t.detach()
        for t in (x, y)
    )
    if x.dtype.is_floating_point or x.dtype.is_complex:
        near = torch.isclose(x, y, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        return "" if bool(near.all()) else f"differs by {float((x - y).abs().max())}"
    return "" if torch.equal(x, y) else "differs"


def _run(
    op: Any, sample: Sample, case: Case, split: bool
) -> tuple[list[Any], list[Any], list[Any]]:
    """Results, tensor arguments after the call, and gradients of these."""
    torch.manual_seed(2)
    tensors, leaves = [], list[tuple[Tensor | None, Layout | None]]()
    for x, layout in zip(sample.tensors, case.layouts, strict=True):
        own, leaf = _argument(x, layout, split)
        tensors.append(own)
        leaves.append((leaf, layout if split else None))
    args, kwargs = sample.called_with(tensors)
    results = _call(op, case.way, args, kwargs, split)
    _backward(results, leaves, split)
    gradients = [_gradient(leaf, layout) for leaf, layout in leaves]
    return results, list(tensors), gradients


def _argument(
    x: Tensor, layout: Layout | None, split: bool
) -> tuple[Tensor, Tensor | None]:
    """A tensor, in parts if a layout is given, and the leaf of it that gets the gradient."""
    whole = x.detach()
    if layout is not None and layout.kind == "partial":
        whole = value(summands(whole, layout), layout)
    if split and layout is not None:
        _, local = placed(whole, layout)
        if not x.requires_grad:
            return HetTensor.wrap(local.detach(), layout, rank_group_of()), None
        if not local.requires_grad:  # complex
            local.requires_grad_()
        return HetTensor.wrap(local * 1, layout, rank_group_of()), local
    leaf = whole.clone()
    if not x.requires_grad:
        return leaf, None
    leaf.requires_grad_()
    return leaf * 1, leaf


def _call(op: Any, way: str, args: Any, kwargs: Any, split: bool) -> list[Any]:
    if way == "method" and op.method_variant is not None:
        return list(tree_leaves(op.method_variant(*args, **kwargs)))
    if way == "in place":
        return list(tree_leaves(op.inplace_variant(*args, **kwargs)))
    if way in ("out", "wrong out"):
        return _with_out(op.op, args, kwargs, way == "wrong out", split)
    found = list(tree_leaves(op.op(*args, **kwargs)))
    if way == "written after":
        for y in found[:2]:
            if (
                isinstance(y, Tensor)
                and y.is_floating_point()
                and y.layout == torch.strided
            ):
                y.clamp_(max=0.25)
    return found


def _with_out(
    function: Callable[..., Any], args: Any, kwargs: Any, wrong: bool, split: bool
) -> list[Any]:
    with torch.no_grad():
        plain = function(*args, **kwargs)
        if not isinstance(plain, Tensor):
            return list(tree_leaves(plain))
        shape = (*plain.shape, 2) if wrong else tuple(plain.shape)
        out = torch.zeros(shape, dtype=plain.dtype)
        if (
            split and isinstance(args[0], HetTensor) and out.dim()
        ):  # the caller's own, in parts
            n = out.shape[-1]
            layout = Layout.sharded(
                out.shape,
                out.dim() - 1,
                (n - n // 3, *(0,) * (args[0].group.size - 2), n // 3),
            )
            out = placed(out, layout)[0].detach()
        return [function(*args, **kwargs, out=out), out]


def _backward(
    results: list[Any],
    leaves: Sequence[tuple[Tensor | None, Layout | None]],
    split: bool,
) -> None:
    if not any(leaf is not None for leaf, _ in leaves):
        return
    generator = torch.Generator(torch.get_default_device()).manual_seed(7)
    ends, cotangents = [], []
    for y in results:
        if (
            not isinstance(y, Tensor)
            or not (y.is_floating_point() or y.is_complex())
            or not y.requires_grad
        ):
            continue
        if isinstance(y, HetTensor):
            y = hetconv.gather(y)
        if y.layout != torch.strided:
            continue
        g = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
        ends.append(y)
        cotangents.append(g)
    if ends:
        torch.autograd.backward(ends, cotangents)


def _gradient(leaf: Tensor | None, layout: Layout | None) -> Tensor | None:
    """Of the whole; zeros where there is none, which is the same to a caller."""
    if leaf is None:
        return None
    if leaf.grad is None:
        shape = layout.shape if layout is not None else tuple(leaf.shape)
        return torch.zeros(shape, dtype=leaf.dtype)
    return leaf.grad if layout is None else full_gradient(leaf, layout)
