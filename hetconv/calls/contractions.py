"""Calls of matrix products and einsum."""

from __future__ import annotations

from torch import Tensor

from hetconv.operators import Contraction

from .base import Args, Call, Kwargs, Reader, arg


def _contraction(inputs: tuple[Tensor, ...], named: list[list[str]], result: list[str]) -> Call | None:
    """None for what torch refuses, and for a label twice in one input, of which the diagonal is meant."""
    extents: dict[str, int] = {}
    for x, labels in zip(inputs, named, strict=True):
        if len(labels) != x.dim() or len(set(labels)) != len(labels):
            return None
        for label, n in zip(labels, x.shape, strict=True):
            if extents.setdefault(label, n) == 1:
                extents[label] = n
            if n not in (1, extents[label]):
                return None
    if len(set(result)) != len(result) or not extents.keys() >= set(result):
        return None
    stretched = (
        tuple(label if n == extents[label] else None for label, n in zip(labels, x.shape, strict=True))
        for x, labels in zip(inputs, named, strict=True)
    )
    return Call(Contraction(tuple(extents[label] for label in result), tuple(stretched), tuple(result)), inputs)


def _einsum(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    equation, *inputs = args
    if not isinstance(equation, str) or "->" not in equation or "." in equation or kwargs:
        return None
    given, result = equation.replace(" ", "").split("->")
    named = [list(labels) for labels in given.split(",")]
    if len(named) != len(inputs) or not all(isinstance(x, Tensor) for x in inputs):
        return None
    return _contraction(tuple(inputs), named, list(result))


def _matmul(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    a = arg(args, kwargs, 0, "input")
    b = arg(args, kwargs, 1, {"matmul": "other"}.get(name, "mat2"))
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or min(a.dim(), b.dim()) < 2:
        return None
    batch = [str(i) for i in range(max(a.dim(), b.dim()) - 2)]
    sides = [[*batch[len(batch) - x.dim() + 2 :], *ends] for x, ends in ((a, "mk"), (b, "kn"))]
    if (name != "matmul" and not a.dim() == b.dim() == {"mm": 2, "bmm": 3}[name]) or a.shape[-1] != b.shape[-2]:
        return None
    return _contraction((a, b), sides, [*batch, "m", "n"])


READERS: dict[str, Reader] = {"bmm": _matmul, "einsum": _einsum, "matmul": _matmul, "mm": _matmul}
