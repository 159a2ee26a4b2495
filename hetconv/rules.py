"""For each operator: what it reads of its inputs and what layout it yields, given their layouts and a split. Pure.

An operator is a frozen dataclass with one method, ``step``. The planner prices the steps, the runtime takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

from .errors import SplitError
from .layout import Box, Layout, Move, Need, Shape, apportion, spans
from .spec import Conv2dSpec, Window

SplitKind = Literal["replicate", "sample", "filter", "channel", "height", "width"]
KINDS: tuple[SplitKind, ...] = ("replicate", "sample", "filter", "channel", "height", "width")
SPATIAL = {"sample": 0, "height": 2, "width": 3}


@dataclass(frozen=True)
class Split:
    """How one operator is cut: a kind and one size per rank (none for ``replicate``).

    ``filter`` and ``channel`` sizes add up to the filters or input channels; the others are proportions.
    """

    kind: SplitKind
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if self.kind not in KINDS:
            raise SplitError(f"split kind {self.kind!r} is not known; choose one of {', '.join(KINDS)}")
        fits = not self.sizes if self.kind == "replicate" else any(self.sizes)
        if not fits or not all(type(s) is int and s >= 0 for s in self.sizes):
            raise SplitError(
                f"Split({self.kind!r}, {self.sizes}) has no valid sizes; give one non-negative integer per rank, "
                f"at least one of them positive (and none at all for 'replicate')"
            )


REPLICATE = Split("replicate")


@dataclass(frozen=True)
class Step:
    """How one operator runs on parts: each input is brought to ``reads``, the local result has the layout ``output``.

    ``contributes``: replicated parameters are used on own parts only, so their gradients are summed over ranks.
    ``forward`` and ``backward`` are further movements, of statistics, performed in their forward sense.
    """

    reads: tuple[Layout | Need, ...]
    output: Layout
    contributes: bool = False
    forward: tuple[Move, ...] = ()
    backward: tuple[Move, ...] = ()


class Op(Protocol):
    """An operator. ``split`` is given to those that a plan names; the others follow their inputs."""

    def step(self, inputs: tuple[Layout, ...], split: Split) -> Step: ...


def on_parts(x: Layout) -> Layout:
    """A partial sum as its consumers on parts want it: scattered over channels in the proportions of its shares."""
    if x.kind != "partial" or len(x.shape) < 2:
        return Layout.replicated(x.shape, x.world) if x.kind == "partial" else x
    return Layout.sharded(x.shape, 1, apportion(x.shape[1], x.shares))


def recut(x: Layout, shape: Shape, dim: int, sizes: Sequence[int]) -> Layout:
    """The layout of an output of ``shape`` that is cut along ``dim`` as ``x`` is cut along its own dimension."""
    return Layout.sharded(shape, dim, sizes) if x.kind == "sharded" else Layout.replicated(shape, x.world)


@dataclass(frozen=True)
class Gather:
    """Any operator without a rule: every rank gathers the inputs and computes the whole."""

    shape: Shape

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        world = inputs[0].world
        whole = tuple(Layout.replicated(x.shape, world) for x in inputs)
        return Step(whole, Layout.replicated(self.shape, world))


@dataclass(frozen=True)
class Conv:
    """A 2-D convolution; its weights are cut by `weight_cut`."""

    spec: Conv2dSpec

    def check(self, split: Split, world: int) -> None:
        """Raises `SplitError` unless ``split`` cuts this convolution among ``world`` ranks."""
        if split.kind == "replicate":
            return
        s, extent = self.spec, {"filter": self.spec.K, "channel": self.spec.C}.get(split.kind)
        if len(split.sizes) != world:
            raise SplitError(f"{split} has {len(split.sizes)} sizes for {world} ranks; give one size per rank")
        if extent is not None and sum(split.sizes) != extent:
            what = "filters" if split.kind == "filter" else "input channels"
            raise SplitError(f"{split} adds up to {sum(split.sizes)}, but the convolution has {extent} {what}")
        per_group = s.C // s.groups
        if split.kind == "channel" and s.groups > 1 and any(size % per_group for size in split.sizes):
            raise SplitError(
                f"{split} cuts through the groups of a convolution with {s.groups} groups of {per_group} input channels; "
                f"give multiples of {per_group}, or split it by filter"
            )

    def canonical(self, split: Split) -> Split:
        """A grouped convolution cut by whole groups of channels is one cut by their filters: nothing is summed."""
        if split.kind != "channel" or self.spec.groups == 1:
            return split
        s = self.spec
        return Split("filter", tuple(size * s.K // s.C for size in split.sizes))

    def weight_cut(self, split: Split) -> tuple[int, tuple[int, ...]] | None:
        """(dimension of the weight, sizes) of a split that cuts the weights, else None."""
        split = self.canonical(split)
        return {"filter": (0, split.sizes), "channel": (1, split.sizes)}.get(split.kind)

    def group_span(self, filters: tuple[int, int]) -> tuple[int, int]:
        """The groups that a span of filters belongs to."""
        per_group = self.spec.K // self.spec.groups
        return (filters[0] // per_group, -(-filters[1] // per_group)) if filters[0] < filters[1] else (0, 0)

    def step(self, inputs: tuple[Layout, ...], split: Split) -> Step:
        (x,), s, split = inputs, self.spec, self.canonical(split)
        if split.kind == "replicate":
            return Gather(s.y_shape).step(inputs)
        if split.kind == "channel":
            return Step((Layout.sharded(s.x_shape, 1, split.sizes),), Layout.partial(s.y_shape, x.world, split.sizes))
        if split.kind == "filter":
            per_group = s.C // s.groups
            groups = [self.group_span(f) for f in spans(split.sizes)]
            whole = Box.whole(s.x_shape)
            need = Need(s.x_shape, tuple(whole.along(1, a * per_group, b * per_group) for a, b in groups))
            return Step((need,), Layout.sharded(s.y_shape, 1, split.sizes))
        dim = SPATIAL[split.kind]
        y = Layout.sharded(s.y_shape, dim, apportion(s.y_shape[dim], split.sizes))
        if dim == 0:
            return Step((Layout.sharded(s.x_shape, 0, y.sizes),), y, contributes=True)
        return Step((window_need(x.shape, y, dim, s.windows[dim - 2]),), y, contributes=True)


def window_need(shape: Shape, y: Layout, dim: int, window: Window) -> Need:
    """What each rank reads of an input of ``shape`` to compute its part of ``y``, which is cut along ``dim``."""
    reads = [window.reads((b.lo[dim], b.hi[dim]), shape[dim]) for b in y.boxes]
    return Need(shape, tuple(Box.whole(shape).along(dim, lo, hi) for lo, hi in reads))


@dataclass(frozen=True)
class Linear:
    """y[..., k] = sum over c of x[..., c] w[k, c]: sample, filter (output features) and channel (input features) splits."""

    x_shape: Shape
    features: int

    @property
    def y_shape(self) -> Shape:
        return (*self.x_shape[:-1], self.features)

    def check(self, split: Split, world: int) -> None:
        """Raises `SplitError` unless ``split`` cuts this operator among ``world`` ranks."""
        if split.kind == "replicate":
            return
        if split.kind in ("height", "width") or (split.kind == "sample" and len(self.x_shape) < 2):
            raise SplitError(f"a linear layer on {self.x_shape} has no {split.kind} to split; use filter or channel")
        if len(split.sizes) != world:
            raise SplitError(f"{split} has {len(split.sizes)} sizes for {world} ranks; give one size per rank")
        extent = {"filter": self.features, "channel": self.x_shape[-1]}.get(split.kind)
        if extent is not None and sum(split.sizes) != extent:
            raise SplitError(f"{split} adds up to {sum(split.sizes)}, but the linear layer has {extent} features there")

    def weight_cut(self, split: Split) -> tuple[int, tuple[int, ...]] | None:
        """(dimension of the weight, sizes) of a split that cuts the weights, else None."""
        return {"filter": (0, split.sizes), "channel": (1, split.sizes)}.get(split.kind)

    def step(self, inputs: tuple[Layout, ...], split: Split) -> Step:
        (x,) = inputs
        last = len(x.shape) - 1
        if split.kind == "filter":
            return Step((Need.everything(x.shape, x.world),), Layout.sharded(self.y_shape, last, split.sizes))
        if split.kind == "channel":
            partial = Layout.partial(self.y_shape, x.world, split.sizes)
            return Step((Layout.sharded(x.shape, last, split.sizes),), partial)
        if split.kind == "sample":
            sizes = apportion(x.shape[0], split.sizes)
            return Step((Layout.sharded(x.shape, 0, sizes),), Layout.sharded(self.y_shape, 0, sizes), contributes=True)
        return Gather(self.y_shape).step(inputs)


@dataclass(frozen=True)
class Pointwise:
    """Elementwise on one or more inputs with broadcasting. The result is cut as the first sharded input is."""

    shape: Shape

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        lead = next((y for x in inputs if (y := self._lifted(on_parts(x))) is not None), None)
        if lead is None:
            return Gather(self.shape).step(inputs)
        return Step(tuple(self._read(x.shape, lead) for x in inputs), lead, contributes=True)

    def _lifted(self, x: Layout) -> Layout | None:
        """The output layout that a sharded input suggests, unless it is cut where it is broadcast."""
        if x.kind != "sharded" or x.dim is None:
            return None
        dim = x.dim + len(self.shape) - len(x.shape)
        return Layout.sharded(self.shape, dim, x.sizes) if self.shape[dim] == x.shape[x.dim] else None

    def _read(self, shape: Shape, lead: Layout) -> Layout | Need:
        if shape == self.shape:
            return lead
        skip = len(self.shape) - len(shape)
        own = [Box(b.lo[skip:], b.hi[skip:]) for b in lead.boxes]
        clipped = [
            Box(
                tuple(min(a, n - 1) for a, n in zip(b.lo, shape, strict=True)) if b.numel else b.lo,
                tuple(map(min, b.hi, shape)),
            )
            for b in own
        ]
        return Need(shape, tuple(clipped))


@dataclass(frozen=True)
class BatchNorm:
    """Batch norm over dimension 1. In training every rank needs the statistics of all parts.

    ``tracks``: running statistics are updated, so a cut over channels must gather them. ``itemsize`` is that of statistics.
    """

    shape: Shape
    training: bool
    tracks: bool

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = on_parts(inputs[0])
        if x.kind != "sharded" or x.dim is None:
            return Gather(self.shape).step(inputs)
        channels, world = self.shape[1], x.world
        if not self.training:
            return Step((x,), x, contributes=True)
        if x.dim == 1:
            stats = Layout.sharded((2, channels), 1, x.sizes)
            gathered = (Move(stats, Layout.replicated((2, channels), world)),) if self.tracks else ()
            return Step((x,), x, contributes=True, forward=gathered)
        each = Layout.sharded((world, 2, channels), 0, (1,) * world)
        total = Layout.partial((2, channels), world)
        return Step(
            (x,),
            x,
            forward=(Move(each, Layout.replicated(each.shape, world)),),
            backward=(Move(total, Layout.replicated(total.shape, world)),),
        )


@dataclass(frozen=True)
class Pool:
    """Max or average pooling with one window per spatial dimension."""

    kind: Literal["max", "average"]
    shape: Shape
    windows: tuple[Window, Window]
    count_padding: bool = True

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        source = inputs[0]
        x = on_parts(source)
        if x.kind != "sharded" or x.dim is None:
            return Gather(self.shape).step(inputs)
        if x.dim < 2:
            return Step((x,), recut(x, self.shape, x.dim, x.sizes))
        y = recut(x, self.shape, x.dim, apportion(self.shape[x.dim], x.sizes))
        return Step((window_need(x.shape, y, x.dim, self.windows[x.dim - 2]),), y)


@dataclass(frozen=True)
class GlobalAveragePool:
    """Adaptive average pooling to 1 x 1. A cut over space gives summands of the mean."""

    shape: Shape

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = inputs[0]
        if x.kind == "partial":
            return Step((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.kind != "sharded" or x.dim is None:
            return Gather(self.shape).step(inputs)
        if x.dim < 2:
            return Step((x,), recut(x, self.shape, x.dim, x.sizes))
        return Step((x,), Layout.partial(self.shape, x.world, x.sizes))


@dataclass(frozen=True)
class PixelShuffle:
    """(N, C r^2, H, W) -> (N, C, H r, W r)."""

    shape: Shape
    factor: int

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x, r = inputs[0], self.factor
        if x.kind == "partial":
            return Step((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.kind == "sharded" and x.dim in (0, 2, 3):
            scale = 1 if x.dim == 0 else r
            return Step((x,), recut(x, self.shape, x.dim, [s * scale for s in x.sizes]))
        if x.kind == "sharded" and x.dim == 1 and all(s % (r * r) == 0 for s in x.sizes):
            return Step((x,), recut(x, self.shape, 1, [s // (r * r) for s in x.sizes]))
        return Gather(self.shape).step(inputs)


@dataclass(frozen=True)
class Flatten:
    """Dimensions ``start`` to ``end`` (inclusive) become one."""

    shape: Shape
    start: int
    end: int

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        x = inputs[0]
        if x.kind == "partial":
            return Step((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.kind == "sharded" and x.dim is not None:
            d = x.dim
            if d < self.start:
                return Step((x,), recut(x, self.shape, d, x.sizes))
            if d > self.end:
                return Step((x,), recut(x, self.shape, d - (self.end - self.start), x.sizes))
            if prod(x.shape[self.start : d]) == 1:
                inner = prod(x.shape[d + 1 : self.end + 1])
                return Step((x,), recut(x, self.shape, self.start, [s * inner for s in x.sizes]))
        return Gather(self.shape).step(inputs)


@dataclass(frozen=True)
class Cat:
    """Concatenation along ``dim`` of inputs that are cut alike along another dimension."""

    shape: Shape
    dim: int

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        parts = (on_parts(x) for x in inputs)
        lead = next((x for x in parts if x.kind == "sharded" and x.dim not in (None, self.dim)), None)
        if lead is None or lead.dim is None:
            return Gather(self.shape).step(inputs)
        reads = tuple(Layout.sharded(x.shape, lead.dim, lead.sizes) for x in inputs)
        return Step(reads, recut(lead, self.shape, lead.dim, lead.sizes))
