"""Products that are summed along some dimensions: matrix products, einsum."""

from __future__ import annotations

from dataclasses import dataclass

from hetconv.sharding.layer_rules import REPLICATE, Gather, Split, Step
from hetconv.sharding.layout import Layout, Need, Shape

from .base import on_parts, per_sample

Labels = tuple[str | None, ...]


def _by_label(op: Contraction, inputs: tuple[Layout, ...]) -> list[bool] | None:
    """The inputs that begin with the label that the result begins with, if it is nowhere else."""
    label = op.result[0] if op.result else None
    once = label is not None and not any(label in named[1:] for named in op.labels)
    return [named[:1] == (label,) for named in op.labels] if once else None


@dataclass(frozen=True)
class Contraction:
    """einsum: a label for each dimension of the inputs and of the result, None where an input is broadcast.

    The first input that is cut says along which label. Who has the label is read cut alike, every other input whole. A
    cut along a label that the result has not gives summands, for the product is linear in each input.
    """

    shape: Shape
    labels: tuple[Labels, ...]
    result: Labels

    @per_sample(_by_label)
    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        parts = zip(map(on_parts, inputs), self.labels, strict=True)
        cuts = ((named[x.dim], x.sizes) for x, named in parts if x.dim is not None)
        label, sizes = next(((label, sizes) for label, sizes in cuts if label is not None), (None, ()))
        if label is None:
            return Gather(self.shape).step(inputs)
        reads = tuple(self._read(x, named, label, sizes) for x, named in zip(inputs, self.labels, strict=True))
        if label in self.result:
            return Step(reads, Layout.sharded(self.shape, self.result.index(label), sizes), contributes=True)
        return Step(reads, Layout.partial(self.shape, inputs[0].world, sizes), contributes=True)

    def _read(self, x: Layout, named: Labels, label: str, sizes: tuple[int, ...]) -> Layout | Need:
        if label in named:
            return Layout.sharded(x.shape, named.index(label), sizes)
        return Need.everything(x.shape, x.world)
