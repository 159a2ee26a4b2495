"""Splits: how a plan divides one layer among ranks, in one level or in two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hetconv.errors import SplitError

from .layout import apportion, spans

SplitKind = Literal[
    "replicate", "sample", "filter", "channel", "depth", "height", "width"
]
KINDS: tuple[SplitKind, ...] = (
    "replicate",
    "sample",
    "filter",
    "channel",
    "depth",
    "height",
    "width",
)
SPATIAL_KINDS: dict[SplitKind, int] = {"depth": 3, "height": 2, "width": 1}
"""The spatial kinds, with the position from the end of the dimension that each splits."""
KINDS_WITHIN_NODES: tuple[SplitKind, ...] = ("filter", "channel", *SPATIAL_KINDS)
"""The kinds by which a node can share its samples among its ranks."""


@dataclass(frozen=True)
class Split:
    """How one layer is split among ranks.

    Attributes:
        kind: What is divided: nothing ("replicate"), samples, filters, input channels,
            or a spatial dimension.
        sizes: One number per rank; none for "replicate". Those of "filter" and
            "channel" add up to the filters or input channels, others are proportions.
        nodes: Of a split of two levels, the number of ranks in each node and its
            proportion of the samples. ``kind`` and ``sizes`` then describe how each
            node shares its samples among its ranks.
        whole: Of a "channel" split, whether an operator that follows on shards, such as
            a norm, gets the sum by an all-reduce. Otherwise the sum is reduce-scattered
            over channels in the proportions of ``sizes``, and all-gathered where it is
            read whole: the same bytes in twice as many messages, but each rank
            normalizes its own channels only.

    Raises:
        SplitError: The fields do not describe a split.

    Examples:
        >>> Split("height", (3, 1)).shares
        (0.75, 0.25)
    """

    kind: SplitKind
    sizes: tuple[int, ...] = ()
    nodes: tuple[tuple[int, int], ...] = ()
    whole: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        object.__setattr__(self, "nodes", tuple(map(tuple, self.nodes)))
        if self.kind not in KINDS:
            raise SplitError(
                f"split kind {self.kind!r} is not known; choose one of {', '.join(KINDS)}"
            )
        fits = not self.sizes if self.kind == "replicate" else any(self.sizes)
        if not fits or not all(type(s) is int and s >= 0 for s in self.sizes):
            raise SplitError(
                f"Split({self.kind!r}, {self.sizes}) has no valid sizes; give one non-negative "
                "integer per rank, at least one of them positive (and none at all for "
                "'replicate')"
            )
        if self.whole and (self.kind != "channel" or self.nodes):
            raise SplitError(
                f"{self} has no sum that could be whole; use whole=True only for channel splits "
                "without nodes"
            )
        if self.nodes:
            self._check_nodes()

    def _check_nodes(self) -> None:
        if self.kind not in KINDS_WITHIN_NODES:
            raise SplitError(
                f"{self} shares samples within nodes by {self.kind}; use "
                f"{', '.join(KINDS_WITHIN_NODES)}, or leave out nodes"
            )
        pairs = all(
            [type(n) for n in node] == [int, int] and min(node) >= 0
            for node in self.nodes
        )
        ranks, shares = zip(*self.nodes, strict=True) if pairs else ((0,), ())
        if min(ranks) < 1 or sum(ranks) != len(self.sizes) or not any(shares):
            raise SplitError(
                f"{self} has no valid nodes; give a pair for each: its number of ranks, "
                f"{len(self.sizes)} in all nodes together, and its proportion of the samples, "
                "at least one of them positive"
            )
        if len(ranks) == 1 or max(ranks) == 1:
            raise SplitError(
                f"{self} has one level; leave out nodes, and split by sample if each node is "
                "one rank"
            )
        if not all(any(self.sizes[lo:hi]) for lo, hi in spans(ranks)):
            raise SplitError(
                f"{self} has a node without sizes; to leave a node out, give it no proportion "
                "of the samples"
            )

    @cached_property
    def node_splits(self) -> tuple[Split, ...]:
        """The split of each node, or this one if it has one level.

        A node of one rank gets a second one without a share.
        """
        if not self.nodes:
            return (self,)
        node_sizes = (self.sizes[lo:hi] for lo, hi in spans(self.ranks))
        return tuple(
            Split(self.kind, sizes if len(sizes) > 1 else (*sizes, 0))
            for sizes in node_sizes
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Number of ranks in each node."""
        return tuple(ranks for ranks, _ in self.nodes)

    @property
    def shares(self) -> tuple[float, ...]:
        """Fraction of the work on each rank; empty for "replicate"."""
        nodes = self.nodes or ((len(self.sizes), 1),)
        total = sum(samples for _, samples in nodes)
        found: list[float] = []
        start = 0
        for ranks, samples in nodes:
            sizes = self.sizes[start : start + ranks]
            found += [samples / total * size / sum(sizes) for size in sizes]
            start += ranks
        return tuple(found)

    def peers(self, rank: int) -> range:
        """Returns the ranks that share samples with ``rank``: all, or those of its node."""
        nodes = (range(lo, hi) for lo, hi in spans(self.ranks or (len(self.sizes),)))
        return next(node for node in nodes if rank in node)

    def samples(self, total: int) -> tuple[int, ...]:
        """Returns how many of ``total`` samples each node has."""
        return apportion(total, tuple(share for _, share in self.nodes))


REPLICATE = Split("replicate")


def ratio_text(weights: Sequence[int]) -> str:
    """Returns proportions, as in ``3:1``."""
    return ":".join(map(str, weights))
