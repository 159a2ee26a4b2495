"""Operators and whole models cut in proportions: by any kind, in one level or in nodes,
where that is legal. Pure.
"""

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
Nodes = tuple[
    tuple[int, float], ...
]  # how many ranks each has, and its proportion of the samples


def has_dimension(graph: Graph, kind: SplitKind) -> bool:
    """Whether there is more than one sample; whether any layer has this spatial dimension."""
    ops = graph.layers.values()
    if kind == "sample":
        return (
            min(op.spec.N if isinstance(op, Conv) else op.x_shape[0] for op in ops) > 1
        )
    return kind not in SPATIAL_KINDS or any(op.dim(kind) is not None for op in ops)


def whole_model(
    graph: Graph,
    kind: SplitKind,
    weights: Sequence[float],
    kinds: Sequence[SplitKind],
    ranks: tuple[int, ...] = (),
) -> Splits:
    """Every layer cut by ``kind`` in these proportions where that is legal; a lone
    device stays alone if it may.

    With nodes of so many ``ranks`` in two levels: samples across them, ``kind`` within.
    """
    grid, nodes = aligned(graph, kind, tuple(weights), ranks), nodes_by(weights, ranks)
    return {
        name: split_of(op, kind, grid, kinds, nodes)
        for name, op in graph.layers.items()
    }


def nodes_by(weights: Sequence[float], ranks: tuple[int, ...]) -> Nodes:
    """Nodes of so many ranks, with the samples in proportion to what their ranks weigh together."""
    return tuple((b - a, sum(weights[a:b])) for a, b in spans(ranks)) if ranks else ()


def aligned(
    graph: Graph, kind: SplitKind, weights: Weights, ranks: tuple[int, ...] = ()
) -> Weights:
    """In space in units of which every cut of the model is a whole number; in each
    node, if there are any.
    """
    if ranks:
        return tuple(
            chain(*(aligned(graph, kind, weights[a:b]) for a, b in spans(ranks)))
        )
    if kind not in SPATIAL_KINDS or min(weights) <= 0:
        return weights
    return tuple(map(float, apportion(_grid(graph, kind), weights)))


def _grid(graph: Graph, kind: SplitKind) -> int:
    """Units in which a spatial cut is counted: the coarsest map's rows if fine enough,
    so that all cuts align.
    """
    convs = [op for op in graph.layers.values() if isinstance(op, Conv)]
    extents = [
        op.spec.y_shape[dim] for op in convs if (dim := op.dim(kind)) is not None
    ]
    return (min(extents) if min(extents) >= 32 else max(extents)) if extents else 1


def split_of(
    op: Conv | Linear,
    kind: SplitKind,
    weights: Sequence[float],
    kinds: Sequence[SplitKind],
    nodes: Nodes = (),
) -> Split:
    """``op`` cut by ``kind``, within ``nodes`` if there are any, or replicated where
    that is not legal.
    """
    if nodes:
        return _in_nodes(op, kind, weights, nodes)
    world = len(weights)
    lone = sum(w > 0 for w in weights) == 1
    if kind in SPATIAL_KINDS and op.dim(kind) is None and lone and "sample" in kinds:
        kind = "sample"  # the device that works alone goes on alone
    extent = extent_of(op, kind)
    if extent is None or extent < 1:
        return REPLICATE
    return checked(
        op,
        kind,
        apportion(extent, tuple(weights), granularity(op, kind, extent, world)),
        world,
    )


def _in_nodes(
    op: Conv | Linear, kind: SplitKind, weights: Sequence[float], nodes: Nodes
) -> Split:
    extent, ranks = extent_of(op, kind), [n for n, _ in nodes]
    sizes: list[int] = []
    if extent is None or extent < 1:
        return REPLICATE
    for a, b in spans(ranks):
        own = (
            tuple(weights[a:b]) if any(weights[a:b]) else (1.0,) * (b - a)
        )  # a node without samples, in any way
        sizes += apportion(extent, own, granularity(op, kind, extent, b - a))
    total = op.spec.N if isinstance(op, Conv) else op.x_shape[0]
    samples = apportion(total, tuple(weight for _, weight in nodes))
    return checked(
        op, kind, tuple(sizes), len(weights), tuple(zip(ranks, samples, strict=True))
    )


def checked(
    op: Conv | Linear,
    kind: SplitKind,
    sizes: tuple[int, ...],
    world: int,
    nodes: tuple[tuple[int, int], ...] = (),
) -> Split:
    try:
        split = Split(kind, sizes, nodes)
        op.check(split, world)
    except SplitError:
        return REPLICATE
    return split


def with_whole_sum(split: Split) -> Split:
    """The same, but that every rank gets the whole sum of a channel split."""
    return (
        replace(split, whole=True)
        if split.kind == "channel" and not split.nodes
        else split
    )


def extent_of(op: Conv | Linear, kind: SplitKind) -> int | None:
    dim = op.dim(kind)
    if isinstance(op, Conv):
        s = op.spec
        return (
            s.y_shape[dim]
            if dim is not None
            else {"filter": s.K, "channel": s.C}.get(kind)
        )
    return (
        op.x_shape[dim]
        if dim is not None
        else {"filter": op.features, "channel": op.x_shape[-1]}.get(kind)
    )


def granularity(op: Conv | Linear, kind: SplitKind, extent: int, world: int) -> int:
    """Kernels want slices of 16 filters or channels; whole groups of channels keep groups whole."""
    if kind == "channel" and isinstance(op, Conv) and op.spec.groups > 1:
        return op.spec.C // op.spec.groups
    return 16 if kind in ("filter", "channel") and extent >= 32 * world else 1
