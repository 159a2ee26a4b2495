"""Hierarchical layouts: samples are sharded across nodes, other dimensions within each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from .layout import Boxes, Layout, ReadRegion, spans


@dataclass(frozen=True)
class HierarchicalLayout(Layout):
    """A layout of two levels.

    The ranks of a node hold the same samples, dimension 0. Of these they hold disjoint
    boxes ("sharded") or a summand each ("partial"): ``kind`` describes a node.

    Attributes:
        nodes: Number of ranks in each node; nodes are consecutive ranks.
    """

    nodes: tuple[int, ...] = ()

    @staticmethod
    def from_nodes(
        nodes: Sequence[int], samples: Sequence[int], layouts: Sequence[Layout]
    ) -> HierarchicalLayout:
        """Returns the layout in which each node shards its samples by its own layout.

        Args:
            nodes: Number of ranks in each node.
            samples: Number of samples in each node.
            layouts: How each node would shard all samples; ranks beyond those of the node
                are left out.
        """
        boxes = [x.boxes[:n] for x, n in zip(layouts, nodes, strict=True)]
        shares = [x.shares[:n] for x, n in zip(layouts, nodes, strict=True)]
        return HierarchicalLayout(
            layouts[0].shape,
            layouts[0].kind,
            boxes_within_nodes(samples, boxes),
            tuple(chain(*shares)),
            tuple(nodes),
        )

    @cached_property
    def node_ranks(self) -> tuple[range, ...]:
        """The ranks of each node."""
        return tuple(range(lo, hi) for lo, hi in spans(self.nodes))

    def peers(self, rank: int) -> range:
        """Returns the ranks of the node to which ``rank`` belongs."""
        return next(ranks for ranks in self.node_ranks if rank in ranks)

    @cached_property
    def samples(self) -> tuple[int, ...]:
        """Number of samples in each node."""
        return tuple(self.boxes[ranks[0]].shape[0] for ranks in self.node_ranks)

    @cached_property
    def node_layouts(self) -> tuple[Layout, ...]:
        """The layout of each node, as if it held all samples.

        A node of one rank gets a second one that holds nothing, so that its layout
        shows the dimension that the other nodes split.
        """
        found = []
        for ranks in self.node_ranks:
            own = slice(ranks.start, ranks.stop)
            boxes = tuple(
                box.with_range(0, 0, self.shape[0]) for box in self.boxes[own]
            )
            found.append(Layout(self.shape, self.kind, boxes, self.shares[own]))
        dim = next((part.dim for part in found if part.world > 1), None) or 0
        if self.kind == "partial":
            single = Layout.partial(self.shape, 2, (1, 0))
        else:
            single = Layout.sharded(self.shape, dim, (self.shape[dim], 0))
        return tuple(part if part.world > 1 else single for part in found)

    @property
    def dim(self) -> None:
        """None, for no single dimension describes the layout."""

    @cached_property
    def inner_dim(self) -> int | None:
        """The dimension that is split within every node, or None."""
        dims = {part.dim for part in self.node_layouts}
        return dims.pop() if len(dims) == 1 else None


def boxes_within_nodes(samples: Sequence[int], boxes: Sequence[Boxes]) -> Boxes:
    """Restricts the boxes of each node's ranks to the samples of the node.

    Args:
        samples: Number of samples in each node.
        boxes: The boxes of each node's ranks.

    Returns:
        One box per rank, node after node.
    """
    own = []
    for (first, end), node_boxes in zip(spans(samples), boxes, strict=True):
        for box in node_boxes:
            lo = max(box.lo[0], first)
            own.append(box.with_range(0, lo, max(lo, min(box.hi[0], end))))
    return tuple(own)


def sharding_within_nodes(
    nodes: Sequence[int],
    samples: Sequence[int],
    reads: Sequence[Sequence[Layout | ReadRegion]],
    outputs: Sequence[Layout],
    has_samples: Sequence[bool],
) -> tuple[tuple[Layout | ReadRegion, ...], HierarchicalLayout] | None:
    """Combines the shardings of nodes, each of which works on its own samples.

    Args:
        nodes: Number of ranks in each node.
        samples: Number of samples in each node.
        reads: For each input, what each node would read of it for all samples.
        outputs: What layout of all samples each node would yield.
        has_samples: For each input, whether its dimension 0 is that of the samples.

    Returns:
        The input layouts and the output layout of all ranks. None where the outputs of
        nodes are split differently, or a node reads samples of another one.
    """
    kinds, dims = {y.kind for y in outputs}, {y.dim for y in outputs}
    same_dim = kinds == {"sharded"} and len(dims) == 1 and not dims & {None, 0}
    if kinds != {"partial"} and not same_dim:
        return None
    combined = []
    for input_reads, of_samples in zip(reads, has_samples, strict=True):
        read = _combined_read(nodes, samples, input_reads, of_samples)
        if read is None:
            return None
        combined.append(read)
    return tuple(combined), HierarchicalLayout.from_nodes(nodes, samples, outputs)


def _combined_read(
    nodes: Sequence[int],
    samples: Sequence[int],
    reads: Sequence[Layout | ReadRegion],
    has_samples: bool,
) -> Layout | ReadRegion | None:
    """Combines what the nodes read of one input."""
    shape = reads[0].shape
    layouts = [read for read in reads if isinstance(read, Layout)]
    kinds = {layout.kind for layout in layouts}
    all_layouts = has_samples and len(layouts) == len(reads)
    if not (kinds <= {"sharded"} or (kinds == {"partial"} and all_layouts)):
        return None
    boxes = [read.boxes[:ranks] for read, ranks in zip(reads, nodes, strict=True)]
    if not has_samples:
        return ReadRegion(shape, tuple(chain(*boxes)))
    every_box = chain(*(read.boxes for read in reads))
    if any(box.numel and (box.lo[0], box.hi[0]) != (0, shape[0]) for box in every_box):
        return None
    if all_layouts:
        return HierarchicalLayout.from_nodes(nodes, samples, layouts)
    return ReadRegion(shape, boxes_within_nodes(samples, boxes))
