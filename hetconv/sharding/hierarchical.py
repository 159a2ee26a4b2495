"""Two levels: samples are cut across nodes, and each node shares its own in any way of
one level. Pure integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from .layout import Boxes, Layout, ReadRegion, spans


@dataclass(frozen=True)
class HierarchicalLayout(Layout):
    """A layout whose first ``nodes[0]`` ranks are one node, the next ``nodes[1]`` the
    second, and so on.

    The ranks of a node hold the same samples, dimension 0. Of these they hold disjoint
    boxes, or each a summand, which is what ``kind`` then says of a node and no more of
    all ranks.
    """

    nodes: tuple[int, ...] = ()

    @staticmethod
    def of(
        nodes: Sequence[int], samples: Sequence[int], parts: Sequence[Layout]
    ) -> HierarchicalLayout:
        """Each node has this many ranks and samples, and shares these as its part says
        of all samples; see `parts`.
        """
        boxes, shares = zip(
            *((p.boxes[:n], p.shares[:n]) for p, n in zip(parts, nodes, strict=True)),
            strict=True,
        )
        own = boxes_within_nodes(samples, boxes)
        return HierarchicalLayout(
            parts[0].shape, parts[0].kind, own, tuple(chain(*shares)), tuple(nodes)
        )

    @cached_property
    def members(self) -> tuple[range, ...]:
        """The ranks of each node."""
        return tuple(range(a, b) for a, b in spans(self.nodes))

    def peers(self, rank: int) -> range:
        """The ranks of the node that a rank is in."""
        return next(ranks for ranks in self.members if rank in ranks)

    @cached_property
    def samples(self) -> tuple[int, ...]:
        """How many samples each node has."""
        return tuple(self.boxes[ranks[0]].shape[0] for ranks in self.members)

    @cached_property
    def parts(self) -> tuple[Layout, ...]:
        """How each node would share all samples.

        Beside a rank that is alone in its node there is one more, which holds nothing,
        so that each part shows its cut.
        """
        boxes = [
            tuple(self.boxes[rank].along(0, 0, self.shape[0]) for rank in ranks)
            for ranks in self.members
        ]
        shares = [
            tuple(self.shares[rank] for rank in ranks) if self.shares else ()
            for ranks in self.members
        ]
        found = [
            Layout(self.shape, self.kind, *both)
            for both in zip(boxes, shares, strict=True)
        ]
        dim = next((part.dim for part in found if part.world > 1), None) or 0
        if self.kind == "partial":
            alone = Layout.partial(self.shape, 2, (1, 0))
        else:
            alone = Layout.sharded(self.shape, dim, (self.shape[dim], 0))
        return tuple(part if part.world > 1 else alone for part in found)

    @property
    def dim(self) -> None:
        """There is no one dimension."""

    @cached_property
    def inner_dim(self) -> int | None:
        dims = {part.dim for part in self.parts}
        return dims.pop() if len(dims) == 1 else None


def boxes_within_nodes(samples: Sequence[int], boxes: Sequence[Boxes]) -> Boxes:
    """Of the boxes of each node's ranks what is of the node's samples, node after node."""
    own = []
    for (first, end), of_node in zip(spans(samples), boxes, strict=True):
        for box in of_node:
            lo = max(box.lo[0], first)
            own.append(box.along(0, lo, max(lo, min(box.hi[0], end))))
    return tuple(own)


def sharding_within_nodes(
    nodes: Sequence[int],
    samples: Sequence[int],
    reads: Sequence[Sequence[Layout | ReadRegion]],
    outputs: Sequence[Layout],
    counted: Sequence[bool],
) -> tuple[tuple[Layout | ReadRegion, ...], HierarchicalLayout] | None:
    """What all ranks read and yield where each node does with its own samples what it
    would do with all of them.

    ``reads`` of each input, and ``outputs``, by node. ``counted``: of each input
    whether its dimension 0 counts the samples. None where the nodes' results do not lie
    alike, or something else than samples of their own is read.
    """
    kinds, dims = {y.kind for y in outputs}, {y.dim for y in outputs}
    if kinds != {"partial"} and (
        kinds != {"sharded"} or len(dims) > 1 or dims & {None, 0}
    ):
        return None
    found = tuple(
        _read(nodes, samples, of_input, own)
        for of_input, own in zip(reads, counted, strict=True)
    )
    whole = tuple(read for read in found if read is not None)
    return (
        (whole, HierarchicalLayout.of(nodes, samples, outputs))
        if len(whole) == len(found)
        else None
    )


def _read(
    nodes: Sequence[int],
    samples: Sequence[int],
    reads: Sequence[Layout | ReadRegion],
    counted: bool,
) -> Layout | ReadRegion | None:
    layouts, shape = (
        [read for read in reads if isinstance(read, Layout)],
        reads[0].shape,
    )
    kinds, laid_out = {x.kind for x in layouts}, counted and len(layouts) == len(reads)
    if not (kinds <= {"sharded"} or (kinds == {"partial"} and laid_out)):
        return None
    if counted and any(
        (b.lo[0], b.hi[0]) != (0, shape[0])
        for read in reads
        for b in read.boxes
        if b.numel
    ):
        return None
    if laid_out:
        return HierarchicalLayout.of(nodes, samples, layouts)
    boxes = [read.boxes[:ranks] for read, ranks in zip(reads, nodes, strict=True)]
    return ReadRegion(
        shape, boxes_within_nodes(samples, boxes) if counted else tuple(chain(*boxes))
    )
