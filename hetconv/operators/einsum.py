"""Products that are summed along some dimensions: matrix products, einsum."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hetconv.sharding.layer_rules import REPLICATE, Gather, OpSharding, Split
from hetconv.sharding.layout import Layout, ReadRegion, Shape

from .base import Args, Call, Kwargs, Reader, arg, per_sample, reduce_scattered

Labels = tuple[str | None, ...]


def _by_label(op: Contraction, inputs: tuple[Layout, ...]) -> list[bool] | None:
    """The inputs that begin with the label that the result begins with, if it is nowhere else."""
    label = op.result[0] if op.result else None
    once = label is not None and not any(label in named[1:] for named in op.labels)
    return [named[:1] == (label,) for named in op.labels] if once else None


@dataclass(frozen=True)
class Contraction:
    """einsum: a label for each dimension of the inputs and of the result, None where an
    input is broadcast.

    The first input that is cut says along which label. Who has the label is read cut
    alike, every other input whole. A cut along a label that the result has not gives
    summands, for the product is linear in each input.
    """

    shape: Shape
    labels: tuple[Labels, ...]
    result: Labels

    @per_sample(_by_label)
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        parts = zip(map(reduce_scattered, inputs), self.labels, strict=True)
        cuts = ((named[x.dim], x.sizes) for x, named in parts if x.dim is not None)
        label, sizes = next(
            ((label, sizes) for label, sizes in cuts if label is not None), (None, ())
        )
        if label is None:
            return Gather(self.shape).sharding(inputs)
        reads = tuple(
            self._read(x, named, label, sizes)
            for x, named in zip(inputs, self.labels, strict=True)
        )
        if label in self.result:
            return OpSharding(
                reads,
                Layout.sharded(self.shape, self.result.index(label), sizes),
                partial_grads=True,
            )
        return OpSharding(
            reads,
            Layout.partial(self.shape, inputs[0].world, sizes),
            partial_grads=True,
        )

    def _read(
        self, x: Layout, named: Labels, label: str, sizes: tuple[int, ...]
    ) -> Layout | ReadRegion:
        if label in named:
            return Layout.sharded(x.shape, named.index(label), sizes)
        return ReadRegion.everything(x.shape, x.world)


def _contraction(
    inputs: tuple[Tensor, ...], named: list[list[str]], result: list[str]
) -> Call | None:
    """None for what torch refuses, and for a label twice in one input, of which the
    diagonal is meant.
    """
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
        tuple(
            label if n == extents[label] else None
            for label, n in zip(labels, x.shape, strict=True)
        )
        for x, labels in zip(inputs, named, strict=True)
    )
    return Call(
        Contraction(
            tuple(extents[label] for label in result), tuple(stretched), tuple(result)
        ),
        inputs,
    )


def _einsum(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    equation, *inputs = args
    if (
        not isinstance(equation, str)
        or "->" not in equation
        or "." in equation
        or kwargs
    ):
        return None
    given, result = equation.replace(" ", "").split("->")
    named = [list(labels) for labels in given.split(",")]
    if len(named) != len(inputs) or not all(isinstance(x, Tensor) for x in inputs):
        return None
    return _contraction(tuple(inputs), named, list(result))


def _matmul(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    a = arg(args, kwargs, 0, "input")
    b = arg(args, kwargs, 1, {"matmul": "other"}.get(name, "mat2"))
    if (
        not (isinstance(a, Tensor) and isinstance(b, Tensor))
        or min(a.dim(), b.dim()) < 2
    ):
        return None
    batch = [str(i) for i in range(max(a.dim(), b.dim()) - 2)]
    sides = [
        [*batch[len(batch) - x.dim() + 2 :], *ends]
        for x, ends in ((a, "mk"), (b, "kn"))
    ]
    if (
        name != "matmul" and not a.dim() == b.dim() == {"mm": 2, "bmm": 3}[name]
    ) or a.shape[-1] != b.shape[-2]:
        return None
    return _contraction((a, b), sides, [*batch, "m", "n"])


READERS: dict[str, Reader] = {
    "bmm": _matmul,
    "einsum": _einsum,
    "matmul": _matmul,
    "mm": _matmul,
}
