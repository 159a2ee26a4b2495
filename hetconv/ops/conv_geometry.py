"""Geometry of a convolution on shards: which rows of the input add to which outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from hetconv.sharding.conv_spec import Segment, Span, Window
from hetconv.sharding.layer_rules import Conv, finds_rows
from hetconv.sharding.layout import Box, Boxes, Layout, ReadRegion
from hetconv.sharding.moves import overlaps
from hetconv.sharding.split import Split


class Slab(NamedTuple):
    """Rows of the input that lie in one tensor, and what they add to the output.

    Attributes:
        segment: The part of the convolution that reads the rows.
        first: Global index of the tensor's first row.
    """

    segment: Segment
    first: int


@dataclass(frozen=True)
class Geometry:
    """This rank's share of a convolution.

    "Rows" are the slices along ``dim``: planes, rows or columns.

    Attributes:
        op: The whole convolution.
        dim: Dimension that is split, or 2.
        y_shape: Shape of the local output.
        first_out: Global index of the first output row.
        groups: Groups of the local convolution.
        own: The rows that this rank holds, or None if they add nothing.
        halos: For each rank whose rows are read too, these rows or None likewise.
        held: Box of the input that each rank holds; () if no halo is exchanged.
        wanted: Box of the input that each rank reads; () likewise.
        adds_bias: Whether this rank adds the bias.
    """

    op: Conv
    dim: int
    y_shape: tuple[int, ...]
    first_out: int
    groups: int
    own: Slab | None
    halos: tuple[tuple[int, Slab | None], ...] = ()
    held: Boxes = ()
    wanted: Boxes = ()
    adds_bias: bool = True

    def padding(self, segment: Segment) -> tuple[Span, ...]:
        """Returns the padding below and above in each spatial dimension."""
        given, i = self.op.spec.padding, self.dim - 2
        return (*given[:i], segment.pad, *given[i + 1 :])

    @cached_property
    def covers(self) -> bool:
        """Returns whether the own rows add to all of the local output.

        They do unless the splits of input and output are far apart.
        """
        out = (self.first_out, self.first_out + self.y_shape[self.dim])
        return self.own is not None and self.own.segment.out == out


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """All rows that a rank reads of an input, in one buffer.

    The buffer has the rows of this rank, the halos, and the padding around the input,
    so that what reads it exchanges and pads nothing along the split.

    Attributes:
        dim: Dimension that is split.
        span: Rows of the buffer as rows of the input, to which those of padding are
            added.
        shape: Shape of the buffer.
        src: Layout of the input.
        read: Box of the input that each rank reads.
        rank: This rank.
    """

    dim: int
    span: Span
    shape: tuple[int, ...]
    src: Layout
    read: ReadRegion
    rank: int

    @property
    def held(self) -> Boxes:
        """Box of the input that each rank holds."""
        return self.src.boxes

    @cached_property
    def rows(self) -> Span:
        """Rows of the buffer that are rows of the input; the others are padding."""
        return self._span(self.read.boxes[self.rank])

    @cached_property
    def padding(self) -> Span:
        """Number of rows of padding before and after the input's."""
        return self.rows[0], self.shape[self.dim] - self.rows[1]

    @cached_property
    def own(self) -> tuple[Span, Span]:
        """The rows that this rank holds and reads: in its shard, and in the buffer."""
        return self._own_span(self.rank), self._span(self._from(self.rank))

    def halo(self, peer: int) -> Span:
        """Returns the rows of the buffer that another rank holds."""
        return self._span(self._from(peer))

    def lent(self, peer: int) -> Span:
        """Returns the rows of this rank's shard that another rank reads."""
        return self._own_span(peer)

    def _from(self, peer: int) -> Box:
        return self.held[peer].intersect(self.read.boxes[self.rank])

    def _own_span(self, reader: int) -> Span:
        held = self.held[self.rank]
        box, first = held.intersect(self.read.boxes[reader]), held.lo[self.dim]
        return box.lo[self.dim] - first, box.hi[self.dim] - first

    def _span(self, box: Box) -> Span:
        first = self.span[0]
        return box.lo[self.dim] - first, box.hi[self.dim] - first


@dataclass(frozen=True, eq=False)
class Region(PaddedRows):
    """All rows that a rank's share of a convolution reads, in one buffer.

    Attributes:
        geo: The convolution of the buffer.
    """

    geo: Geometry


def padded_rows(
    src: Layout, read: ReadRegion, dim: int, window: Window, out: Span, rank: int
) -> PaddedRows | None:
    """Returns the rows that a rank reads for its outputs.

    There are none, on any rank, if no halo is exchanged or if a rank reads none of the
    rows that it holds.

    Args:
        src: Layout of the input.
        read: Box of the input that each rank reads.
        dim: Dimension that is split.
        window: What an output reads along this dimension.
        out: Outputs of the rank along this dimension.
        rank: The rank.
    """
    pairs = zip(src.boxes, read.boxes, strict=True)
    if not all(held.intersect(box).numel for held, box in pairs):
        return None
    if all(sender == reader for sender, reader, _ in overlaps(src.boxes, read.boxes)):
        return None
    box, (before, after) = read.boxes[rank], window.padding(out, src.shape[dim])
    span, shape = (box.lo[dim] - before, box.hi[dim] + after), list(box.shape)
    shape[dim] = span[1] - span[0]
    return PaddedRows(dim, span, tuple(shape), src, read, rank)


def region_of(op: Conv, src: Layout, split: Split, rank: int) -> Region | None:
    """Returns the region that a rank's convolution with halos reads.

    There is none, on any rank, if no halo is exchanged or if a rank reads none of the
    rows that it holds.

    Args:
        op: The whole convolution.
        src: Layout of its input.
        split: How it is split.
        rank: The rank.
    """
    if not finds_rows(op, src, split):
        return None
    geo = spatial_geometry(op, src, split, rank)
    if not geo.held:
        return None
    dim, spec = geo.dim, geo.op.spec
    window, read = spec.windows[dim - 2], ReadRegion(spec.x_shape, geo.wanted)
    out = (geo.first_out, geo.first_out + geo.y_shape[dim])
    rows = padded_rows(src, read, dim, window, out, rank)
    if rows is None:
        return None
    segment = Segment(rows.span, out, (0, window.kernel), (0, 0))
    own = Slab(segment, rows.span[0])
    buffered = replace(geo, own=own, halos=(), held=(), wanted=())
    return Region(dim, rows.span, rows.shape, src, read, rank, buffered)


def _slab(window: Window, rows: Span, out: Span) -> Slab | None:
    segment = window.segment(rows, out)
    return Slab(segment, rows[0]) if segment is not None else None


@lru_cache(maxsize=4096)
def spatial_geometry(op: Conv, x: Layout, split: Split, rank: int) -> Geometry:
    """Returns the geometry with halos, if input and output are split along one dimension.

    Args:
        op: The convolution.
        x: Layout of the input, sharded along the split's dimension.
        split: A spatial split.
        rank: This rank.
    """
    dim = op.dim(split.kind)
    assert dim is not None
    sharding = op.sharding((x,), split)
    window, (read,) = op.spec.windows[dim - 2], sharding.input_layouts
    box, own = sharding.output.boxes[rank], x.boxes[rank]
    out = (box.lo[dim], box.hi[dim])
    pairs = overlaps(x.boxes, read.boxes)
    sent = [(src, dst, piece) for src, dst, piece in pairs if src != dst]
    halos = tuple(
        (src, _slab(window, (piece.lo[dim], piece.hi[dim]), out))
        for src, dst, piece in sent
        if dst == rank
    )
    held, wanted = (x.boxes, read.boxes) if sent else ((), ())
    own_slab = _slab(window, (own.lo[dim], own.hi[dim]), out)
    return Geometry(
        op, dim, box.shape, out[0], op.spec.groups, own_slab, halos, held, wanted
    )


@lru_cache(maxsize=4096)
def slab_geometry(op: Conv, x: Layout, split: Split, rank: int) -> Geometry:
    """Returns the geometry without halos: all rows that the rank reads are in one tensor."""
    sharding = op.sharding((x,), split)
    dim = op.dim(split.kind) or 2
    box, read = sharding.output.boxes[rank], sharding.input_layouts[0].boxes[rank]
    out = (box.lo[dim], box.hi[dim])
    own = _slab(op.spec.windows[dim - 2], (read.lo[dim], read.hi[dim]), out)
    adds_bias = split.kind != "channel" or rank == split.peers(rank)[0]
    return Geometry(
        op, dim, box.shape, out[0], op.spec.groups, own, adds_bias=adds_bias
    )


@lru_cache(maxsize=4096)
def group_geometry(op: Conv, samples: int, filters: int, groups: int) -> Geometry:
    """Returns the geometry of some filters of a grouped convolution.

    Args:
        op: The whole convolution.
        samples: Size of the batch.
        filters: Number of filters.
        groups: Number of groups that they belong to.
    """
    s = op.spec
    src, split = Layout.replicated(s.x_shape, 1), Split("filter", (s.K,))
    y_shape = (samples, filters, *s.y_shape[2:])
    return replace(slab_geometry(op, src, split, 0), y_shape=y_shape, groups=groups)
