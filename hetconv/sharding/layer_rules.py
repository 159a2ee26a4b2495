"""Sharding rules of the layers that a plan splits: convolutions and linear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hetconv.errors import SplitError

from .conv_spec import ConvSpec, Span, Window
from .hierarchical import HierarchicalLayout, sharding_within_nodes
from .layout import Box, Layout, Layouts, ReadRegion, Shape, apportion, spans
from .param_shards import ParamShards
from .rule import Gather, Operator, OpSharding
from .split import SPATIAL_KINDS, Split, SplitKind

# Elements of the filters per element of the input above which halos are concatenated.
MIN_FILTER_TO_INPUT_RATIO = 1.0


def split_dim(kind: SplitKind, spatial_dims: range) -> int | None:
    """Returns the tensor dimension that a kind of split divides, or None.

    Args:
        kind: Kind of the split.
        spatial_dims: Dimensions of the tensor that are depth, height and width, as many
            as it has.
    """
    if kind == "sample":
        return 0
    from_end = SPATIAL_KINDS.get(kind, 0)
    return spatial_dims[-from_end] if 0 < from_end <= len(spatial_dims) else None


def _check_split(
    op: Conv | Linear,
    split: Split,
    world: int,
    layer: str,
    extents: Mapping[str, tuple[int, str]],
) -> None:
    """Checks dimension, number of sizes, and their sum where it must be an extent."""
    with_dim = [kind for kind in ("sample", *SPATIAL_KINDS) if op.dim(kind) is not None]
    kinds: tuple[SplitKind, ...] = (
        ("sample", split.kind) if split.nodes else (split.kind,)
    )
    for kind in kinds:
        if kind not in (*with_dim, *extents):
            known = ", ".join([*with_dim, "filter"])
            raise SplitError(f"{layer} has no {kind} to split; use {known} or channel")
    if len(split.sizes) != world:
        raise SplitError(
            f"{split} has {len(split.sizes)} sizes for {world} ranks; give one size per rank"
        )
    if split.kind not in extents:
        return
    extent, unit = extents[split.kind]
    for node, part in enumerate(split.node_splits):
        total = sum(part.sizes)
        if total != extent:
            where = f" in node {node}" if split.nodes else ""
            raise SplitError(
                f"{split} adds up to {total}{where}, but {layer} has {extent} {unit}; give "
                "sizes that add up to it"
            )


def _sharding_in_nodes(
    op: Conv | Linear, y_shape: Shape, x: Layout, split: Split
) -> OpSharding:
    """Shards samples across nodes; each node shards its own by its part of the split."""
    shardings = [
        op.sharding((Layout.replicated(x.shape, len(part.sizes)),), part)
        for part in split.node_splits
    ]
    combined = sharding_within_nodes(
        split.ranks,
        split.samples(x.shape[0]),
        [[sharding.input_layouts[0] for sharding in shardings]],
        [sharding.output for sharding in shardings],
        (True,),
    )
    if combined is None:
        return Gather(y_shape).sharding((x,))
    return OpSharding(*combined, partial_grads=True)


def _partial_output(shape: Shape, split: Split) -> Layout:
    """Returns the layout of a result under a channel split."""
    shares = () if split.whole else split.sizes
    return Layout.partial(shape, len(split.sizes), shares)


def exchanges_halos(op: Operator, x: Layout, split: Split) -> bool:
    """Whether a convolution keeps its rows in place and exchanges halos.

    It does so where a spatial split finds its input split alike, unless halos are
    concatenated to the rows.

    Args:
        op: The operator, which need not be a convolution.
        x: Layout of its input.
        split: How the plan splits it.
    """
    if not isinstance(op, Conv) or split.kind not in SPATIAL_KINDS:
        return False
    return not concatenates_halos(op, split.kind) and finds_rows(op, x, split)


def finds_rows(op: Conv, x: Layout, split: Split) -> bool:
    """Whether a spatial split finds its input split alike, so that only halos move.

    Args:
        op: The convolution.
        x: Layout of its input.
        split: How the plan splits it.
    """
    if split.kind not in SPATIAL_KINDS:
        return False
    if x.kind != "sharded" or x.inner_dim != op.dim(split.kind):
        return False
    if not isinstance(x, HierarchicalLayout):
        return not split.nodes
    if not split.nodes:
        return False
    return (x.nodes, x.samples) == (split.ranks, split.samples(x.shape[0]))


def concatenates_halos(op: Conv, kind: SplitKind) -> bool:
    """Whether halos are concatenated to a rank's rows, and both convolved at once.

    On small maps with many channels, reading the filters a second time for the halo
    takes longer than copying the rows. So it does where each filter reads one channel,
    which computes little for each pixel.

    Args:
        op: The convolution.
        kind: Kind of its split.
    """
    dim, spec = op.dim(kind), op.spec
    if dim is None or spec.kernel[dim - 2] == 1:
        return False
    if spec.groups == spec.C > 1:
        return True
    return prod(spec.w_shape) > MIN_FILTER_TO_INPUT_RATIO * prod(spec.x_shape)


@lru_cache(maxsize=4096)
def _param_shards(shape: Shape, split: Split, world: int) -> Mapping[str, ParamShards]:
    """Returns the shards of a weight of ``shape`` and of its bias."""
    return {
        "weight": _shards_under(split, shape, world),
        "bias": _shards_under(split, shape[:1], world),
    }


def _shards_under(split: Split, shape: Shape, world: int) -> ParamShards:
    """Returns the shards of one parameter, in every node that has samples."""
    everyone = (1,) * world
    if not split.nodes:
        return _one_level_shards(split.kind, shape, split.sizes or everyone, everyone)
    boxes: list[Box] = []
    dim = 1 if split.kind == "channel" and len(shape) > 1 else 0
    empty = Box.whole(shape).with_range(dim, 0, 0)
    for (ranks, samples), part in zip(split.nodes, split.node_splits, strict=True):
        first_only = (1, *(0,) * (len(part.sizes) - 1))
        shards = _one_level_shards(split.kind, shape, part.sizes, first_only)
        boxes += shards.boxes[:ranks] if samples else (empty,) * ranks
    return ParamShards(shape, tuple(boxes))


def _one_level_shards(
    kind: SplitKind, shape: Shape, sizes: Sequence[int], bias_holders: Sequence[int]
) -> ParamShards:
    """Shards a parameter by filter or channel, or holds it whole on ranks with work.

    Under a channel split of nodes, one rank of each node adds the bias to its summand.
    """
    dim = {"filter": 0, "channel": 1}.get(kind)
    if dim is None:
        return ParamShards.on_ranks(shape, sizes)
    if dim < len(shape):
        return ParamShards.sharded(shape, dim, sizes)
    return ParamShards.on_ranks(shape, bias_holders)


@dataclass(frozen=True)
class Conv:
    """A convolution of any rank.

    Attributes:
        spec: Its shapes and options.
    """

    spec: ConvSpec

    def check(self, split: Split, world: int) -> None:
        """Checks that ``split`` divides this convolution among ``world`` ranks.

        Raises:
            SplitError: It does not.
        """
        if split.kind == "replicate":
            return
        spec = self.spec
        extents = {
            "filter": (spec.K, "filters"),
            "channel": (spec.C, "input channels"),
        }
        layer = f"a {spec.spatial_dims}-D convolution"
        _check_split(self, split, world, layer, extents)
        per_group = spec.C // spec.groups
        if (
            split.kind == "channel"
            and spec.groups > 1
            and any(size % per_group for size in split.sizes)
        ):
            raise SplitError(
                f"{split} splits through the groups of a convolution with {spec.groups} groups of "
                f"{per_group} input channels; give multiples of {per_group}, or split it by "
                "filter"
            )

    def dim(self, kind: SplitKind) -> int | None:
        """Returns the dimension of input and output that ``kind`` splits, or None."""
        return split_dim(kind, range(2, 2 + self.spec.spatial_dims))

    def canonical(self, split: Split) -> Split:
        """Returns a filter split for a channel split of a grouped convolution.

        Whole groups of channels yield whole groups of filters, so nothing is summed.
        All other splits are returned as they are.
        """
        spec = self.spec
        if split.kind != "channel" or spec.groups == 1:
            return split
        filters = tuple(size * spec.K // spec.C for size in split.sizes)
        return Split("filter", filters, split.nodes)

    def param_shards(self, split: Split, world: int) -> Mapping[str, ParamShards]:
        """Returns the shards of "weight" and "bias" among ``world`` ranks."""
        return _param_shards(self.spec.w_shape, self.canonical(split), world)

    def group_span(self, filters: Span) -> Span:
        """Returns the range of groups to which a range of filters belongs."""
        if filters[0] >= filters[1]:
            return (0, 0)
        per_group = self.spec.K // self.spec.groups
        return filters[0] // per_group, -(-filters[1] // per_group)

    def sharding(self, inputs: Layouts, split: Split) -> OpSharding:
        """Returns how the convolution runs under ``split``; see `Operator`."""
        (x,), spec, split = inputs, self.spec, self.canonical(split)
        if split.nodes:
            return _sharding_in_nodes(self, spec.y_shape, x, split)
        if split.kind == "channel":
            own_channels = Layout.sharded(spec.x_shape, 1, split.sizes)
            return OpSharding((own_channels,), _partial_output(spec.y_shape, split))
        if split.kind == "filter":
            y = Layout.sharded(spec.y_shape, 1, split.sizes)
            return OpSharding((self._channels_of_groups(split),), y)
        dim = self.dim(split.kind)
        if dim is None:
            return Gather(spec.y_shape).sharding(inputs)
        sizes = apportion(spec.y_shape[dim], split.sizes)
        y = Layout.sharded(spec.y_shape, dim, sizes)
        reads = (
            Layout.sharded(spec.x_shape, 0, sizes)
            if dim == 0
            else window_reads(x, y, dim, spec.windows[dim - 2])
        )
        return OpSharding((reads,), y, partial_grads=True)

    def _channels_of_groups(self, split: Split) -> ReadRegion:
        """Returns the input channels that each rank's filters read."""
        spec, whole = self.spec, Box.whole(self.spec.x_shape)
        per_group = spec.C // spec.groups
        groups = [self.group_span(filters) for filters in spans(split.sizes)]
        boxes = (whole.with_range(1, a * per_group, b * per_group) for a, b in groups)
        return ReadRegion(spec.x_shape, tuple(boxes))


def window_reads(x: Layout, y: Layout, dim: int, window: Window) -> ReadRegion:
    """Returns what ranks read of an input, halos included, to compute their outputs.

    A rank that holds what it reads, and less than a stride beyond it, reads that too: it
    adds no output, and the input is not cut.

    Args:
        x: Layout of the input.
        y: Layout of the output, sharded along ``dim``.
        dim: Dimension that is split.
        window: The sliding window along ``dim``.
    """
    reads = [window.reads((b.lo[dim], b.hi[dim]), x.shape[dim]) for b in y.boxes]
    whole = Box.whole(x.shape)
    boxes = tuple(whole.with_range(dim, lo, hi) for lo, hi in reads)
    if x.kind == "sharded":
        boxes = tuple(
            own if _exceeds_by_less(own, box, dim, window.stride) else box
            for own, box in zip(x.boxes, boxes, strict=True)
        )
    return ReadRegion(x.shape, boxes)


def _exceeds_by_less(own: Box, box: Box, dim: int, stride: int) -> bool:
    """Returns whether a box is another one, and less than ``stride`` beyond its end."""
    a, b = box.lo[dim], box.hi[dim]
    return a < b < own.hi[dim] < b + stride and own == box.with_range(
        dim, a, own.hi[dim]
    )


@dataclass(frozen=True)
class Linear:
    """A linear layer, y[..., k] = sum over c of x[..., c] w[k, c].

    A filter split divides its output features, a channel split its input features. An
    input (N, H, W, C) or (N, D, H, W, C), an image with its channels last, can be split
    along its spatial dimensions too.

    Attributes:
        x_shape: Shape of the input.
        features: Number of output features.
    """

    x_shape: Shape
    features: int

    @property
    def y_shape(self) -> Shape:
        """Shape of the output."""
        return (*self.x_shape[:-1], self.features)

    def check(self, split: Split, world: int) -> None:
        """Checks that ``split`` divides this layer among ``world`` ranks.

        Raises:
            SplitError: It does not.
        """
        if split.kind == "replicate":
            return
        extents = {
            "filter": (self.features, "output features"),
            "channel": (self.x_shape[-1], "input features"),
        }
        layer = f"a linear layer on {self.x_shape}"
        _check_split(self, split, world, layer, extents)

    def param_shards(self, split: Split, world: int) -> Mapping[str, ParamShards]:
        """Returns the shards of "weight" and "bias" among ``world`` ranks."""
        return _param_shards((self.features, self.x_shape[-1]), split, world)

    def dim(self, kind: SplitKind) -> int | None:
        """Returns the dimension of input and output that ``kind`` splits, or None."""
        rank = len(self.x_shape)
        if kind == "sample" and rank == 1:
            return None
        return split_dim(kind, range(1, rank - 1) if rank >= 4 else range(0))

    def sharding(self, inputs: Layouts, split: Split) -> OpSharding:
        """Returns how the layer runs under ``split``; see `Operator`."""
        (x,) = inputs
        if split.nodes:
            return _sharding_in_nodes(self, self.y_shape, x, split)
        last = len(x.shape) - 1
        if split.kind == "filter":
            y = Layout.sharded(self.y_shape, last, split.sizes)
            return OpSharding((ReadRegion.everything(x.shape, x.world),), y)
        if split.kind == "channel":
            own_channels = Layout.sharded(x.shape, last, split.sizes)
            return OpSharding((own_channels,), _partial_output(self.y_shape, split))
        dim = self.dim(split.kind)
        if dim is None:
            return Gather(self.y_shape).sharding(inputs)
        sizes = apportion(x.shape[dim], split.sizes)
        y = Layout.sharded(self.y_shape, dim, sizes)
        return OpSharding((Layout.sharded(x.shape, dim, sizes),), y, partial_grads=True)
