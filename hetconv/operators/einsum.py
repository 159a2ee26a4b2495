"""Contractions, products that are summed along some dimensions: matmul, einsum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hetconv.sharding.layout import Layout, Layouts, ReadRegion, Shape
from hetconv.sharding.rule import OpSharding

from .base import Args, Call, Kwargs, PerSampleOperator, Reader, arg, reduce_scattered

Labels = tuple[str | None, ...]


@dataclass(frozen=True)
class Contraction(PerSampleOperator):
    """An einsum.

    The first sharded input decides along which label ranks split the operation. Inputs
    with the label are sharded alike, all others replicated. If the result does not have
    the label, it is partial.

    Attributes:
        shape: Shape of the result.
        labels: For each input, the label of each dimension; None where it is broadcast.
        result: The label of each dimension of the result.
    """

    shape: Shape
    labels: tuple[Labels, ...]
    result: Labels

    def _has_samples(self, inputs: Layouts) -> Sequence[bool] | None:
        """Takes the first label of the result for that of samples, if it is nowhere else."""
        label = self.result[0] if self.result else None
        if label is None or any(label in labels[1:] for labels in self.labels):
            return None
        return [labels[:1] == (label,) for labels in self.labels]

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        lead = self._sharded_label(inputs)
        if lead is None:
            return None
        label, sizes = lead
        reads: list[Layout | ReadRegion] = []
        for x, labels in zip(inputs, self.labels, strict=True):
            if label in labels:
                reads.append(Layout.sharded(x.shape, labels.index(label), sizes))
            else:
                reads.append(ReadRegion.everything(x.shape, x.world))
        if label in self.result:
            y = Layout.sharded(self.shape, self.result.index(label), sizes)
        else:
            y = Layout.partial(self.shape, inputs[0].world, sizes)
        return OpSharding(tuple(reads), y, partial_grads=True)

    def _sharded_label(self, inputs: Layouts) -> tuple[str, tuple[int, ...]] | None:
        """Returns the label that the first sharded input splits, and its sizes."""
        for x, labels in zip(map(reduce_scattered, inputs), self.labels, strict=True):
            label = None if x.dim is None else labels[x.dim]
            if label is not None:
                return label, x.sizes
        return None


def _contract(
    inputs: tuple[Tensor, ...], labels: list[list[str]], result: list[str]
) -> Call | None:
    """Reads an einsum, unless a label is twice in one input and means its diagonal."""
    extents: dict[str, int] = {}
    for x, own in zip(inputs, labels, strict=True):
        if len(own) != x.dim() or len(set(own)) != len(own):
            return None
        for label, n in zip(own, x.shape, strict=True):
            if extents.setdefault(label, n) == 1:
                extents[label] = n
            if n not in (1, extents[label]):
                return None
    if len(set(result)) != len(result) or not extents.keys() >= set(result):
        return None
    unbroadcast: list[Labels] = []
    for x, own in zip(inputs, labels, strict=True):
        sides = zip(own, x.shape, strict=True)
        unbroadcast.append(tuple(a if n == extents[a] else None for a, n in sides))
    shape = tuple(extents[label] for label in result)
    return Call(Contraction(shape, tuple(unbroadcast), tuple(result)), inputs)


def _read_einsum(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    equation, *inputs = args
    if not isinstance(equation, str) or kwargs:
        return None
    if "->" not in equation or "." in equation:
        return None
    given, result = equation.replace(" ", "").split("->")
    labels = [list(own) for own in given.split(",")]
    if len(labels) != len(inputs) or not all(isinstance(x, Tensor) for x in inputs):
        return None
    return _contract(tuple(inputs), labels, list(result))


def _read_matmul(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    a = arg(args, kwargs, 0, "input")
    b = arg(args, kwargs, 1, "other" if name == "matmul" else "mat2")
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return None
    if min(a.dim(), b.dim()) < 2 or a.shape[-1] != b.shape[-2]:
        return None
    rank = {"mm": 2, "bmm": 3}.get(name)
    if rank is not None and not a.dim() == b.dim() == rank:
        return None
    batch = [str(i) for i in range(max(a.dim(), b.dim()) - 2)]
    labels_a = [*batch[len(batch) - a.dim() + 2 :], "m", "k"]
    labels_b = [*batch[len(batch) - b.dim() + 2 :], "k", "n"]
    return _contract((a, b), [labels_a, labels_b], [*batch, "m", "n"])


READERS: dict[str, Reader] = {
    "bmm": _read_matmul,
    "einsum": _read_einsum,
    "matmul": _read_matmul,
    "mm": _read_matmul,
}
