"""For each operator: what it reads of its inputs and what layout it yields, given their layouts and a split. Pure.

An operator is a frozen dataclass with one method, ``step``. The planner prices the steps, the runtime takes them.
Here are the layers that a plan names; operators that follow their inputs are in `following`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, Protocol

from .errors import SplitError
from .layout import Box, Layout, Move, Need, Shape, apportion, spans
from .spec import ConvSpec, Window

SplitKind = Literal["replicate", "sample", "filter", "channel", "depth", "height", "width"]
KINDS: tuple[SplitKind, ...] = ("replicate", "sample", "filter", "channel", "depth", "height", "width")
SPACE: dict[SplitKind, int] = {"depth": 3, "height": 2, "width": 1}
"""The spatial kinds, and which of a layer's spatial dimensions each cuts, counted from the last one."""


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


class Op(Hashable, Protocol):
    """An operator. ``split`` is given to those that a plan names; the others follow their inputs."""

    def step(self, inputs: tuple[Layout, ...], split: Split) -> Step: ...


@dataclass(frozen=True)
class Gather:
    """Any operator without a rule: every rank gathers the inputs and computes the whole."""

    shape: Shape

    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        world = inputs[0].world
        whole = tuple(Layout.replicated(x.shape, world) for x in inputs)
        return Step(whole, Layout.replicated(self.shape, world))


def cut_dim(kind: SplitKind, space: range) -> int | None:
    """The dimension that samples, depth, height or width are, if there is one. ``space``: the spatial dimensions."""
    if kind == "sample":
        return 0
    back = SPACE.get(kind, 0)
    return space[-back] if 0 < back <= len(space) else None


def _check_fit(op: Conv | Linear, split: Split, world: int, said: str) -> None:
    """What both layers refuse: a kind for which there is no dimension, another number of sizes than ranks."""
    where: tuple[SplitKind, ...] = ("sample", *SPACE)
    if split.kind in where and op.dim(split.kind) is None:
        others = [kind for kind in where if op.dim(kind) is not None]
        raise SplitError(f"{said} has no {split.kind} to split; use {', '.join([*others, 'filter'])} or channel")
    if len(split.sizes) != world:
        raise SplitError(f"{split} has {len(split.sizes)} sizes for {world} ranks; give one size per rank")


@dataclass(frozen=True)
class Conv:
    """A convolution of any rank; its weights are cut by `weight_cut`."""

    spec: ConvSpec

    def check(self, split: Split, world: int) -> None:
        """Raises `SplitError` unless ``split`` cuts this convolution among ``world`` ranks."""
        if split.kind == "replicate":
            return
        s, extent = self.spec, {"filter": self.spec.K, "channel": self.spec.C}.get(split.kind)
        _check_fit(self, split, world, f"a {s.spatial_dims}-D convolution")
        if extent is not None and sum(split.sizes) != extent:
            what = "filters" if split.kind == "filter" else "input channels"
            raise SplitError(f"{split} adds up to {sum(split.sizes)}, but the convolution has {extent} {what}")
        per_group = s.C // s.groups
        if split.kind == "channel" and s.groups > 1 and any(size % per_group for size in split.sizes):
            raise SplitError(
                f"{split} cuts through the groups of a convolution with {s.groups} groups of {per_group} input "
                f"channels; give multiples of {per_group}, or split it by filter"
            )

    def dim(self, kind: SplitKind) -> int | None:
        """The dimension of the input, and of the output, that samples, depth, height or width are, if it has it."""
        return cut_dim(kind, range(2, 2 + self.spec.spatial_dims))

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
        dim = self.dim(split.kind)
        assert dim is not None, f"{split} of {s}, which `check` refuses"
        y = Layout.sharded(s.y_shape, dim, apportion(s.y_shape[dim], split.sizes))
        if dim == 0:
            return Step((Layout.sharded(s.x_shape, 0, y.sizes),), y, contributes=True)
        return Step((window_need(x.shape, y, dim, s.windows[dim - 2]),), y, contributes=True)


def window_need(shape: Shape, y: Layout, dim: int, window: Window) -> Need:
    """What each rank reads of an input of ``shape`` to compute its part of ``y``, which is cut along ``dim``."""
    reads = [window.reads((b.lo[dim], b.hi[dim]), shape[dim]) for b in y.boxes]
    whole = Box.whole(shape)
    return Need(shape, tuple(whole.along(dim, lo, hi) for lo, hi in reads))


@dataclass(frozen=True)
class Linear:
    """y[..., k] = sum over c of x[..., c] w[k, c]. Filters are output features, channels input features.

    An input (N, H, W, C) or (N, D, H, W, C), an image with its channels last, can be cut in space too.
    """

    x_shape: Shape
    features: int

    @property
    def y_shape(self) -> Shape:
        return (*self.x_shape[:-1], self.features)

    def check(self, split: Split, world: int) -> None:
        """Raises `SplitError` unless ``split`` cuts this operator among ``world`` ranks."""
        if split.kind == "replicate":
            return
        _check_fit(self, split, world, f"a linear layer on {self.x_shape}")
        extent = {"filter": self.features, "channel": self.x_shape[-1]}.get(split.kind)
        if extent is not None and sum(split.sizes) != extent:
            raise SplitError(f"{split} adds up to {sum(split.sizes)}, but the linear layer has {extent} features there")

    def weight_cut(self, split: Split) -> tuple[int, tuple[int, ...]] | None:
        """(dimension of the weight, sizes) of a split that cuts the weights, else None."""
        return {"filter": (0, split.sizes), "channel": (1, split.sizes)}.get(split.kind)

    def dim(self, kind: SplitKind) -> int | None:
        """The dimension of the input that samples, depth, height or width are, if it has it."""
        rank = len(self.x_shape)
        if kind == "sample" and rank == 1:
            return None
        return cut_dim(kind, range(1, rank - 1) if rank >= 4 else range(0))

    def step(self, inputs: tuple[Layout, ...], split: Split) -> Step:
        (x,) = inputs
        last = len(x.shape) - 1
        if split.kind == "filter":
            return Step((Need.everything(x.shape, x.world),), Layout.sharded(self.y_shape, last, split.sizes))
        if split.kind == "channel":
            partial = Layout.partial(self.y_shape, x.world, split.sizes)
            return Step((Layout.sharded(x.shape, last, split.sizes),), partial)
        if (dim := self.dim(split.kind)) is not None:
            sizes = apportion(x.shape[dim], split.sizes)
            cut = Layout.sharded(x.shape, dim, sizes)
            return Step((cut,), Layout.sharded(self.y_shape, dim, sizes), contributes=True)
        return Gather(self.y_shape).step(inputs)
