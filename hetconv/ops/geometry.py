"""Where a rank's share of a convolution reads, and what each run of rows adds to its output. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from hetconv.sharding.conv_spec import Segment, Span
from hetconv.sharding.layer_rules import Conv, Split
from hetconv.sharding.layout import Boxes, Layout, pieces


@dataclass(frozen=True)
class Geometry:
    """This rank's share of a convolution: its own segment, and one per rank whose rows it also reads.

    Rows are what ``dim`` counts: planes, rows or columns.
    """

    op: Conv
    dim: int
    y_shape: tuple[int, ...]
    first_out: int
    groups: int
    own: Segment | None
    own_lo: int
    halos: tuple[tuple[int, Segment | None, int], ...] = ()  # (rank, segment, first row of its piece)
    held: Boxes = ()
    wanted: Boxes = ()
    adds_bias: bool = True

    def padding(self, segment: Segment) -> tuple[Span, ...]:
        given, i = self.op.spec.padding, self.dim - 2
        return (*given[:i], segment.pad, *given[i + 1 :])

    @cached_property
    def covers(self) -> bool:
        """Whether the own segment adds to all of the own output (always, but for cuts far out of line)."""
        return self.own is not None and self.own.out == (self.first_out, self.first_out + self.y_shape[self.dim])


@lru_cache(maxsize=4096)
def spatial_geometry(op: Conv, x: Layout, split: Split, rank: int) -> Geometry:
    """Where ``x`` is cut along the same dimension: own rows as they lie, the others' pieces as halos."""
    dim = op.dim(split.kind)
    assert dim is not None
    step = op.step((x,), split)
    window, (need,) = op.spec.windows[dim - 2], step.reads
    out = step.output.boxes[rank]
    span, mine = (out.lo[dim], out.hi[dim]), x.boxes[rank]
    travels = [(s, r, box) for s, r, box in pieces(x.boxes, need.boxes) if s != r]
    halos = tuple(
        (s, window.segment((box.lo[dim], box.hi[dim]), span), box.lo[dim]) for s, r, box in travels if r == rank
    )
    own = window.segment((mine.lo[dim], mine.hi[dim]), span)
    held, wanted = (x.boxes, need.boxes) if travels else ((), ())
    return Geometry(op, dim, out.shape, span[0], op.spec.groups, own, mine.lo[dim], halos, held, wanted)


@lru_cache(maxsize=4096)
def slab_geometry(op: Conv, x: Layout, split: Split, rank: int) -> Geometry:
    """Where all that this rank reads lies in one slab."""
    step = op.step((x,), split)
    dim = op.dim(split.kind) or 2
    out, need = step.output.boxes[rank], step.reads[0].boxes[rank]
    span = (out.lo[dim], out.hi[dim])
    own = op.spec.windows[dim - 2].segment((need.lo[dim], need.hi[dim]), span)
    adds_bias = split.kind != "channel" or rank == split.mates(rank)[0]
    return Geometry(op, dim, out.shape, span[0], op.spec.groups, own, need.lo[dim], adds_bias=adds_bias)


@lru_cache(maxsize=4096)
def group_geometry(op: Conv, samples: int, filters: int, groups: int) -> Geometry:
    """Some filters of a grouped convolution, which read whole images of their own groups."""
    s = op.spec
    whole = slab_geometry(op, Layout.replicated(s.x_shape, 1), Split("filter", (s.K,)), 0)
    return replace(whole, y_shape=(samples, filters, *s.y_shape[2:]), groups=groups)
