"""What the rules of operators that follow their inputs have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..layout import Box, Layout, Need, Shape, apportion
from ..spec import Span


def on_parts(x: Layout) -> Layout:
    """A partial sum as its consumers on parts want it: scattered over channels in the proportions of its shares."""
    if x.kind != "partial" or len(x.shape) < 2:
        return Layout.replicated(x.shape, x.world) if x.kind == "partial" else x
    return Layout.sharded(x.shape, 1, apportion(x.shape[1], x.shares))


def recut(x: Layout, shape: Shape, dim: int, sizes: Sequence[int]) -> Layout:
    """The layout of an output of ``shape`` that is cut along ``dim`` as ``x`` is cut along its own dimension."""
    return Layout.sharded(shape, dim, sizes) if x.kind == "sharded" else Layout.replicated(shape, x.world)


def slabs(shape: Shape, dim: int, spans: Iterable[Span]) -> Need:
    """A range along ``dim`` for each rank, and everything of all other dimensions."""
    return Need(shape, tuple(Box.whole(shape).along(dim, lo, hi) for lo, hi in spans))
