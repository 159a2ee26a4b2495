"""For each operator: what it reads of its inputs and what layout it yields, given their
layouts and a split. Pure.

An operator is a frozen dataclass with one method, ``step``. The planner prices the
steps, the runtime takes them. Here are the layers that a plan names; operators that
follow their inputs are in `operators`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Protocol

from hetconv.errors import SplitError

from .conv_spec import ConvSpec, Window
from .hierarchical import HierarchicalLayout, sharding_within_nodes
from .layout import Box, Layout, Move, ReadRegion, Shape, apportion, spans
from .param_shards import ParamShards
from .split import KINDS, REPLICATE, SPATIAL_KINDS, Split, SplitKind

__all__ = [
    "KINDS",
    "REPLICATE",
    "SPATIAL_KINDS",
    "Conv",
    "Gather",
    "Linear",
    "OpSharding",
    "Operator",
    "Split",
    "SplitKind",
    "concatenates_halos",
    "cut_dim",
    "exchanges_halos",
    "window_reads",
]

# times as many numbers in the filters as in the input, from which on halos are joined
# to own rows
MAX_INPUT_TO_FILTER_RATIO = 1.0


@dataclass(frozen=True)
class OpSharding:
    """How one operator runs on parts: each input is brought to ``reads``, the local
    result has the layout ``output``.

    ``contributes``: replicated parameters are used on own parts only, so their
    gradients are summed over ranks. ``forward`` and ``backward`` are further movements,
    of statistics, performed in their forward sense. ``tells``: how many numbers each
    rank has to tell all others, which it does with those of other operators when the
    forward ends.
    """

    input_layouts: tuple[Layout | ReadRegion, ...]
    output: Layout
    partial_grads: bool = False
    forward_moves: tuple[Move, ...] = ()
    backward_moves: tuple[Move, ...] = ()
    shared_stats: tuple[int, ...] = ()


class Operator(Hashable, Protocol):
    """An operator. ``split`` is given to those that a plan names; the others follow
    their inputs.
    """

    def sharding(self, inputs: tuple[Layout, ...], split: Split) -> OpSharding: ...


@dataclass(frozen=True)
class Gather:
    """Any operator without a rule: every rank gathers the inputs and computes the whole."""

    shape: Shape

    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        world = inputs[0].world
        whole = tuple(Layout.replicated(x.shape, world) for x in inputs)
        return OpSharding(whole, Layout.replicated(self.shape, world))


def cut_dim(kind: SplitKind, space: range) -> int | None:
    """The dimension that samples, depth, height or width are, if there is one.
    ``space``: the spatial dimensions.
    """
    if kind == "sample":
        return 0
    back = SPATIAL_KINDS.get(kind, 0)
    return space[-back] if 0 < back <= len(space) else None


def _check_fit(op: Conv | Linear, split: Split, world: int, said: str) -> None:
    """What both layers refuse: a kind for which there is no dimension, another number
    of sizes than ranks.
    """
    where: tuple[SplitKind, ...] = ("sample", *SPATIAL_KINDS)
    kinds: tuple[SplitKind, ...] = (
        ("sample", split.kind) if split.nodes else (split.kind,)
    )
    for kind in kinds:
        if kind in where and op.dim(kind) is None:
            others = [kind for kind in where if op.dim(kind) is not None]
            raise SplitError(
                f"{said} has no {kind} to split; use {', '.join([*others, 'filter'])} or channel"
            )
    if len(split.sizes) != world:
        raise SplitError(
            f"{split} has {len(split.sizes)} sizes for {world} ranks; give one size per rank"
        )


def _other_sum(split: Split, extent: int) -> str | None:
    """What the sizes add up to, in all or in the first node where that is not
    ``extent``; None where it is.
    """
    sums = enumerate(sum(part.sizes) for part in split.parts)
    return next(
        (
            f"{n}{f' in node {k}' if split.nodes else ''}"
            for k, n in sums
            if n != extent
        ),
        None,
    )


def _in_nodes(op: Conv | Linear, shape: Shape, x: Layout, split: Split) -> OpSharding:
    """Each node's step, on its own samples, with a result of ``shape``."""
    steps = [
        op.sharding((Layout.replicated(x.shape, len(part.sizes)),), part)
        for part in split.parts
    ]
    reads, outputs = (
        [[step.input_layouts[0] for step in steps]],
        [step.output for step in steps],
    )
    found = sharding_within_nodes(
        split.ranks, split.samples(x.shape[0]), reads, outputs, (True,)
    )
    return (
        OpSharding(*found, partial_grads=True)
        if found is not None
        else Gather(shape).sharding((x,))
    )


def _summands(shape: Shape, split: Split) -> Layout:
    """Of a result under a channel split."""
    return Layout.partial(shape, len(split.sizes), () if split.whole else split.sizes)


def exchanges_halos(op: Operator, x: Layout, split: Split) -> bool:
    """Whether a convolution's input is cut as a spatial split cuts it, so that own rows
    stay and halos come to them.

    Not where these are joined.
    """
    if (
        not isinstance(op, Conv)
        or split.kind not in SPATIAL_KINDS
        or x.kind != "sharded"
        or x.inner_dim != op.dim(split.kind)
    ):
        return False
    if concatenates_halos(op, split.kind):
        return False
    levels = (x.nodes, x.samples) if isinstance(x, HierarchicalLayout) else ()
    return levels == ((split.ranks, split.samples(x.shape[0])) if split.nodes else ())


def concatenates_halos(op: Conv, kind: SplitKind) -> bool:
    """Whether halos are joined to own rows, and both convolved at once: of small maps
    with many channels, where to read the filters once more, for a halo alone, takes
    longer than to copy own rows.
    """
    dim, s = op.dim(kind), op.spec
    has_halos = dim is not None and s.kernel[dim - 2] > 1
    return has_halos and prod(s.w_shape) > MAX_INPUT_TO_FILTER_RATIO * prod(s.x_shape)


@lru_cache(maxsize=4096)
def _held(shape: Shape, split: Split, world: int) -> Mapping[str, ParamShards]:
    """Of a weight of this shape and its bias: own slices of what is cut, of the rest
    the whole where there is work.
    """
    bias, everyone = shape[:1], (1,) * world
    if split.nodes:
        return {
            "weight": _held_in_nodes(shape, split),
            "bias": _held_in_nodes(bias, split),
        }
    if split.kind == "filter":
        return {
            "weight": ParamShards.sharded(shape, 0, split.sizes),
            "bias": ParamShards.sharded(bias, 0, split.sizes),
        }
    if split.kind == "channel":
        return {
            "weight": ParamShards.sharded(shape, 1, split.sizes),
            "bias": ParamShards.on_ranks(bias, everyone),
        }
    shares = split.sizes or everyone
    return {
        "weight": ParamShards.on_ranks(shape, shares),
        "bias": ParamShards.on_ranks(bias, shares),
    }


def _held_in_nodes(shape: Shape, split: Split) -> ParamShards:
    """Cut by filter or channel in every node that has samples, or the whole on every
    rank that has work.
    """
    boxes: list[Box] = []
    dim = {"filter": 0, "channel": 1}.get(split.kind, len(shape))
    nothing = Box.whole(shape).along(dim if dim < len(shape) else 0, 0, 0)
    for (ranks, samples), part in zip(split.nodes, split.parts, strict=True):
        if dim < len(shape):
            cut = ParamShards.sharded(shape, dim, part.sizes)
        else:  # one rank of a node adds the bias to what it makes of its channels
            first = (1, *(0,) * (len(part.sizes) - 1))
            cut = ParamShards.on_ranks(
                shape, first if split.kind == "channel" else part.sizes
            )
        boxes += cut.boxes[:ranks] if samples else (nothing,) * ranks
    return ParamShards(shape, tuple(boxes))


@dataclass(frozen=True)
class Conv:
    """A convolution of any rank."""

    spec: ConvSpec

    def check(self, split: Split, world: int) -> None:
        """Raises `SplitError` unless ``split`` cuts this convolution among ``world`` ranks."""
        if split.kind == "replicate":
            return
        s, extent = (
            self.spec,
            {"filter": self.spec.K, "channel": self.spec.C}.get(split.kind),
        )
        _check_fit(self, split, world, f"a {s.spatial_dims}-D convolution")
        if extent is not None and (found := _other_sum(split, extent)) is not None:
            what = "filters" if split.kind == "filter" else "input channels"
            raise SplitError(
                f"{split} adds up to {found}, but the convolution has {extent} {what}"
            )
        per_group = s.C // s.groups
        if (
            split.kind == "channel"
            and s.groups > 1
            and any(size % per_group for size in split.sizes)
        ):
            raise SplitError(
                f"{split} cuts through the groups of a convolution with {s.groups} groups of "
                f"{per_group} input "
                f"channels; give multiples of {per_group}, or split it by filter"
            )

    def dim(self, kind: SplitKind) -> int | None:
        """The dimension of the input, and of the output, that samples, depth, height or
        width are, if it has it.
        """
        return cut_dim(kind, range(2, 2 + self.spec.spatial_dims))

    def canonical(self, split: Split) -> Split:
        """A grouped convolution cut by whole groups of channels is one cut by their
        filters: nothing is summed.
        """
        if split.kind != "channel" or self.spec.groups == 1:
            return split
        s = self.spec
        return Split(
            "filter", tuple(size * s.K // s.C for size in split.sizes), split.nodes
        )

    def param_shards(self, split: Split, world: int) -> Mapping[str, ParamShards]:
        """Which ranks hold what of the parameters."""
        return _held(self.spec.w_shape, self.canonical(split), world)

    def group_span(self, filters: tuple[int, int]) -> tuple[int, int]:
        """The groups that a span of filters belongs to."""
        per_group = self.spec.K // self.spec.groups
        return (
            (filters[0] // per_group, -(-filters[1] // per_group))
            if filters[0] < filters[1]
            else (0, 0)
        )

    def sharding(self, inputs: tuple[Layout, ...], split: Split) -> OpSharding:
        (x,), s, split = inputs, self.spec, self.canonical(split)
        if split.nodes:
            return _in_nodes(self, s.y_shape, x, split)
        if split.kind == "replicate":
            return Gather(s.y_shape).sharding(inputs)
        if split.kind == "channel":
            return OpSharding(
                (Layout.sharded(s.x_shape, 1, split.sizes),),
                _summands(s.y_shape, split),
            )
        if split.kind == "filter":
            per_group = s.C // s.groups
            groups = [self.group_span(f) for f in spans(split.sizes)]
            whole = Box.whole(s.x_shape)
            need = ReadRegion(
                s.x_shape,
                tuple(whole.along(1, a * per_group, b * per_group) for a, b in groups),
            )
            return OpSharding((need,), Layout.sharded(s.y_shape, 1, split.sizes))
        dim = self.dim(split.kind)
        assert dim is not None, f"{split} of {s}, which `check` refuses"
        y = Layout.sharded(s.y_shape, dim, apportion(s.y_shape[dim], split.sizes))
        if dim == 0:
            return OpSharding(
                (Layout.sharded(s.x_shape, 0, y.sizes),), y, partial_grads=True
            )
        return OpSharding(
            (window_reads(x.shape, y, dim, s.windows[dim - 2]),), y, partial_grads=True
        )


def window_reads(shape: Shape, y: Layout, dim: int, window: Window) -> ReadRegion:
    """What each rank reads of an input of ``shape`` to compute its part of ``y``, which
    is cut along ``dim``.
    """
    reads = [window.reads((b.lo[dim], b.hi[dim]), shape[dim]) for b in y.boxes]
    whole = Box.whole(shape)
    return ReadRegion(shape, tuple(whole.along(dim, lo, hi) for lo, hi in reads))


@dataclass(frozen=True)
class Linear:
    """y[..., k] = sum over c of x[..., c] w[k, c]. Filters are output features,
    channels input features.

    An input (N, H, W, C) or (N, D, H, W, C), an image with its channels last, can be
    cut in space too.
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
        if extent is not None and (found := _other_sum(split, extent)) is not None:
            raise SplitError(
                f"{split} adds up to {found}, but the linear layer has {extent} features there"
            )

    def param_shards(self, split: Split, world: int) -> Mapping[str, ParamShards]:
        """Which ranks hold what of the parameters."""
        return _held((self.features, self.x_shape[-1]), split, world)

    def dim(self, kind: SplitKind) -> int | None:
        """The dimension of the input that samples, depth, height or width are, if it has it."""
        rank = len(self.x_shape)
        if kind == "sample" and rank == 1:
            return None
        return cut_dim(kind, range(1, rank - 1) if rank >= 4 else range(0))

    def sharding(self, inputs: tuple[Layout, ...], split: Split) -> OpSharding:
        (x,) = inputs
        if split.nodes:
            return _in_nodes(self, self.y_shape, x, split)
        last = len(x.shape) - 1
        if split.kind == "filter":
            return OpSharding(
                (ReadRegion.everything(x.shape, x.world),),
                Layout.sharded(self.y_shape, last, split.sizes),
            )
        if split.kind == "channel":
            return OpSharding(
                (Layout.sharded(x.shape, last, split.sizes),),
                _summands(self.y_shape, split),
            )
        if (dim := self.dim(split.kind)) is not None:
            sizes = apportion(x.shape[dim], split.sizes)
            cut = Layout.sharded(x.shape, dim, sizes)
            return OpSharding(
                (cut,), Layout.sharded(self.y_shape, dim, sizes), partial_grads=True
            )
        return Gather(self.y_shape).sharding(inputs)
