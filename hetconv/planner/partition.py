"""Splits of operators and of whole models in given proportions, where that is legal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from hetconv.errors import SplitError
from hetconv.sharding.layer_rules import Conv, Linear
from hetconv.sharding.layout import apportion, spans
from hetconv.sharding.split import REPLICATE, SPATIAL_KINDS, Split, SplitKind
from hetconv.tracing.graph import Graph

Splits = dict[str, Split]
Weights = tuple[float, ...]
# Number of ranks of each node (host), and its proportion of the samples.
Nodes = tuple[tuple[int, float], ...]
# Kernels compute slices of so many filters or channels at a time.
CHANNELS_PER_SLICE = 16
# A map of at least so many rows is fine enough to be the unit of all spatial splits.
MIN_GRID_ROWS = 32


def has_dimension(graph: Graph, kind: SplitKind) -> bool:
    """Whether a model can be split by a kind at all.

    For samples, whether there are several; for spatial kinds, whether any layer has the
    dimension.
    """
    ops = graph.layers.values()
    if kind == "sample":
        return min(_samples(op) for op in ops) > 1
    return kind not in SPATIAL_KINDS or any(op.dim(kind) is not None for op in ops)


def _samples(op: Conv | Linear) -> int:
    return op.spec.N if isinstance(op, Conv) else op.x_shape[0]


def whole_model(
    graph: Graph,
    kind: SplitKind,
    weights: Sequence[float],
    kinds: Sequence[SplitKind],
    ranks: tuple[int, ...] = (),
) -> Splits:
    """Splits every layer by one kind in the same proportions, where that is legal.

    Args:
        graph: Model.
        kind: Kind of split.
        weights: Proportion of each rank.
        kinds: Kinds that are allowed. Layers that one device computes alone may be
            split by sample, if that is one of them.
        ranks: Number of ranks of each node, for hierarchical splits: samples across
            nodes, and ``kind`` within.

    Returns:
        The split of each layer.
    """
    grid = aligned(graph, kind, tuple(weights), ranks)
    nodes = nodes_by(weights, ranks)
    return {
        name: split_of(op, kind, grid, kinds, nodes)
        for name, op in graph.layers.items()
    }


def nodes_by(weights: Sequence[float], ranks: tuple[int, ...]) -> Nodes:
    """Weighs each node by the sum of its ranks' weights.

    Args:
        weights: Proportion of each rank.
        ranks: Number of ranks of each node.
    """
    if not ranks:
        return ()
    return tuple((b - a, sum(weights[a:b])) for a, b in spans(ranks))


def aligned(
    graph: Graph, kind: SplitKind, weights: Weights, ranks: tuple[int, ...] = ()
) -> Weights:
    """Rounds the proportions of a spatial split, so that the splits of all layers align.

    Args:
        graph: Model.
        kind: Kind of split; the weights of other than spatial kinds stay.
        weights: Proportion of each rank.
        ranks: Number of ranks of each node, where each rounds for itself.
    """
    if ranks:
        by_node = (aligned(graph, kind, weights[a:b]) for a, b in spans(ranks))
        return tuple(chain.from_iterable(by_node))
    if kind not in SPATIAL_KINDS or min(weights) <= 0:
        return weights
    return tuple(map(float, apportion(_grid_rows(graph, kind), weights)))


def _grid_rows(graph: Graph, kind: SplitKind) -> int:
    """Rows of the coarsest map, or of the finest one where the coarsest has too few."""
    convs = [op for op in graph.layers.values() if isinstance(op, Conv)]
    extents = [
        op.spec.y_shape[dim] for op in convs if (dim := op.dim(kind)) is not None
    ]
    if not extents:
        return 1
    return min(extents) if min(extents) >= MIN_GRID_ROWS else max(extents)


def split_of(
    op: Conv | Linear,
    kind: SplitKind,
    weights: Sequence[float],
    kinds: Sequence[SplitKind],
    nodes: Nodes = (),
) -> Split:
    """Splits a layer in given proportions, or replicates it where that is not legal.

    Args:
        op: Layer.
        kind: Kind of split.
        weights: Proportion of each rank.
        kinds: Kinds that are allowed; see `whole_model`.
        nodes: Nodes of a hierarchical split.
    """
    if nodes:
        return _split_within_nodes(op, kind, weights, nodes)
    world = len(weights)
    single = sum(w > 0 for w in weights) == 1
    if kind in SPATIAL_KINDS and op.dim(kind) is None and single and "sample" in kinds:
        kind = "sample"  # the device that works alone computes this layer too
    extent = extent_of(op, kind)
    if not extent:
        return REPLICATE
    if kind in SPATIAL_KINDS and extent == 1 and not single:
        # The others would wait for the one rank with the row, and then for its result.
        return REPLICATE
    grain = granularity(op, kind, extent, world)
    return checked(op, kind, apportion(extent, tuple(weights), grain), world)


def _split_within_nodes(
    op: Conv | Linear, kind: SplitKind, weights: Sequence[float], nodes: Nodes
) -> Split:
    extent, ranks = extent_of(op, kind), [count for count, _ in nodes]
    if not extent:
        return REPLICATE
    sizes: list[int] = []
    for start, end in spans(ranks):
        count, own = end - start, tuple(weights[start:end])
        if not any(own):  # a node without samples may be split in any way
            own = (1.0,) * count
        sizes += apportion(extent, own, granularity(op, kind, extent, count))
    samples = apportion(_samples(op), tuple(weight for _, weight in nodes))
    samples_by_node = tuple(zip(ranks, samples, strict=True))
    return checked(op, kind, tuple(sizes), len(weights), samples_by_node)


def checked(
    op: Conv | Linear,
    kind: SplitKind,
    sizes: tuple[int, ...],
    world: int,
    nodes: tuple[tuple[int, int], ...] = (),
) -> Split:
    """Returns a split, or `REPLICATE` where it is not legal for the layer.

    Args:
        op: Layer.
        kind: Kind of split.
        sizes: Elements of each rank.
        world: Number of ranks.
        nodes: Ranks and samples of each node, for a hierarchical split.
    """
    try:
        split = Split(kind, sizes, nodes)
        op.check(split, world)
    except SplitError:
        return REPLICATE
    return split


def with_whole_sum(split: Split) -> Split:
    """Returns a channel split whose sum every rank gets whole; other splits stay."""
    if split.kind == "channel" and not split.nodes:
        return replace(split, whole=True)
    return split


def extent_of(op: Conv | Linear, kind: SplitKind) -> int | None:
    """Returns how many elements of a layer a kind splits; None if it has no such ones."""
    dim = op.dim(kind)
    if isinstance(op, Conv):
        shape, filters, channels = op.spec.y_shape, op.spec.K, op.spec.C
    else:
        shape, filters, channels = op.x_shape, op.features, op.x_shape[-1]
    if dim is not None:
        return shape[dim]
    return {"filter": filters, "channel": channels}.get(kind)


def granularity(op: Conv | Linear, kind: SplitKind, extent: int, world: int) -> int:
    """Returns the number of elements that a split should keep together.

    These are the channels of a group, and slices of filters or channels for kernels.

    Args:
        op: Layer.
        kind: Kind of split.
        extent: Elements to split.
        world: Number of ranks.
    """
    if kind == "channel" and isinstance(op, Conv) and op.spec.groups > 1:
        return op.spec.C // op.spec.groups
    if kind in ("filter", "channel") and extent >= 2 * CHANNELS_PER_SLICE * world:
        return CHANNELS_PER_SLICE
    return 1
