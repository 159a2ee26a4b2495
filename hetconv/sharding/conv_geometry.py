"""Geometry of what one rank computes of a convolution: its own rows, and halos."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from .conv_spec import Segment, Span
from .layer_rules import Conv
from .layout import Boxes, Layout
from .moves import overlaps
from .split import Split


@dataclass(frozen=True)
class Geometry:
    """What one rank computes of a convolution: its own segment, and one for each halo.

    "Rows" are what ``dim`` counts: planes, rows or columns.

    Attributes:
        op: The convolution.
        dim: The sharded dimension.
        y_shape: Shape of this rank's output.
        first_out: Its first row in the whole output.
        groups: Number of groups that it computes.
        own: Segment of its own rows; None if there is none.
        own_lo: The first of its own rows in the whole input.
        halos: Rank, segment, and first row of its piece, for each other rank.
        held: Box of the input that each rank holds.
        wanted: Box of the input that each rank reads.
        adds_bias: Whether this rank adds the bias.
    """

    op: Conv
    dim: int
    y_shape: tuple[int, ...]
    first_out: int
    groups: int
    own: Segment | None
    own_lo: int
    halos: tuple[tuple[int, Segment | None, int], ...] = ()
    held: Boxes = ()
    wanted: Boxes = ()
    adds_bias: bool = True

    def padding(self, segment: Segment) -> tuple[Span, ...]:
        """Returns the padding of a segment in each spatial dimension."""
        given, i = self.op.spec.padding, self.dim - 2
        return (*given[:i], segment.pad, *given[i + 1 :])

    @cached_property
    def covers(self) -> bool:
        """Whether the own segment contributes to all outputs of the rank.

        It does unless the boundaries of input and output are far apart.
        """
        return self.own is not None and self.own.out == (
            self.first_out,
            self.first_out + self.y_shape[self.dim],
        )


@lru_cache(maxsize=4096)
def spatial_geometry(op: Conv, x: Layout, split: Split, rank: int) -> Geometry:
    """Returns the geometry for an input that is sharded like the output, with halos."""
    dim = op.dim(split.kind)
    assert dim is not None
    sharding = op.sharding((x,), split)
    window, (need,) = op.spec.windows[dim - 2], sharding.input_layouts
    out = sharding.output.boxes[rank]
    span, mine = (out.lo[dim], out.hi[dim]), x.boxes[rank]
    travels = [(s, r, box) for s, r, box in overlaps(x.boxes, need.boxes) if s != r]
    halos = tuple(
        (s, window.segment((box.lo[dim], box.hi[dim]), span), box.lo[dim])
        for s, r, box in travels
        if r == rank
    )
    own = window.segment((mine.lo[dim], mine.hi[dim]), span)
    held, wanted = (x.boxes, need.boxes) if travels else ((), ())
    return Geometry(
        op,
        dim,
        out.shape,
        span[0],
        op.spec.groups,
        own,
        mine.lo[dim],
        halos,
        held,
        wanted,
    )


@lru_cache(maxsize=4096)
def slab_geometry(op: Conv, x: Layout, split: Split, rank: int) -> Geometry:
    """Returns the geometry where all that this rank reads is in one tensor."""
    sharding = op.sharding((x,), split)
    dim = op.dim(split.kind) or 2
    out, need = sharding.output.boxes[rank], sharding.input_layouts[0].boxes[rank]
    span = (out.lo[dim], out.hi[dim])
    own = op.spec.windows[dim - 2].segment((need.lo[dim], need.hi[dim]), span)
    adds_bias = split.kind != "channel" or rank == split.peers(rank)[0]
    return Geometry(
        op,
        dim,
        out.shape,
        span[0],
        op.spec.groups,
        own,
        need.lo[dim],
        adds_bias=adds_bias,
    )


@lru_cache(maxsize=4096)
def group_geometry(op: Conv, samples: int, filters: int, groups: int) -> Geometry:
    """Returns the geometry of some filters of a grouped convolution, on whole images."""
    spec = op.spec
    x = Layout.replicated(spec.x_shape, 1)
    whole = slab_geometry(op, x, Split("filter", (spec.K,)), 0)
    y_shape = (samples, filters, *spec.y_shape[2:])
    return replace(whole, y_shape=y_shape, groups=groups)
