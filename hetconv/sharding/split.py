"""How one operator of a plan is cut among ranks, in one level or in two. Pure."""

from __future__ import annotations

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
"""The spatial kinds, and which of a layer's spatial dimensions each cuts, counted from
the last one.
"""
KINDS_WITHIN_NODES: tuple[SplitKind, ...] = ("filter", "channel", *SPATIAL_KINDS)
"""The kinds that each node may share its samples by."""


@dataclass(frozen=True)
class Split:
    """How one operator is cut: a kind and one size per rank (none for ``replicate``).

    ``filter`` and ``channel`` sizes add up to the filters or input channels; the others
    are proportions.

    ``nodes``: of a split of two levels, the ranks that each node has, one after
    another, and its proportion of the samples. Kind and sizes then say how each node
    shares its samples among its ranks.

    ``whole``: what follows a ``channel`` split on parts, such as a norm, gets its sum
    whole on every rank. Otherwise that is scattered over channels, in the proportions
    of the sizes, and gathered where it is wanted whole: as many bytes in twice as many
    messages, but each rank norms its own channels alone.
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
                "integer per rank, "
                f"at least one of them positive (and none at all for 'replicate')"
            )
        if self.whole and (self.kind != "channel" or self.nodes):
            raise SplitError(
                f"{self} has no sum that could be whole; give that to channel splits of one "
                "level alone"
            )
        if self.nodes:
            self._check_nodes()

    def _check_nodes(self) -> None:
        if self.kind not in KINDS_WITHIN_NODES:
            raise SplitError(
                f"{self} shares samples within nodes by {self.kind}; use "
                f"{', '.join(KINDS_WITHIN_NODES)}, "
                "or leave out nodes"
            )
        fits = all(
            [type(n) for n in node] == [int, int] and min(node) >= 0
            for node in self.nodes
        )
        ranks, shares = zip(*self.nodes, strict=True) if fits else ((), ())
        if (
            not fits
            or min(ranks) < 1
            or sum(ranks) != len(self.sizes)
            or not any(shares)
        ):
            raise SplitError(
                f"{self} has no valid nodes; give a pair for each, of its ranks, "
                f"{len(self.sizes)} in all nodes "
                f"together, and of its proportion of the samples, at least one of them positive"
            )
        if len(ranks) == 1 or max(ranks) == 1:
            raise SplitError(
                f"{self} has one level; leave out nodes, and split by sample if each node is "
                "one rank"
            )
        if not all(any(self.sizes[a:b]) for a, b in spans(ranks)):
            raise SplitError(
                f"{self} has a node without sizes; to leave a node out, give it no proportion "
                "of the samples"
            )

    @cached_property
    def parts(self) -> tuple[Split, ...]:
        """The split of each node; beside a rank that is alone in its node there is one
        more, without a share.
        """
        if not self.nodes:
            return (self,)
        own = (self.sizes[a:b] for a, b in spans(self.ranks))
        return tuple(
            Split(self.kind, sizes if len(sizes) > 1 else (*sizes, 0)) for sizes in own
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """How many ranks each node has."""
        return tuple(ranks for ranks, _ in self.nodes)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of all work, that each rank has; none for ``replicate``."""
        nodes = self.nodes or ((len(self.sizes), 1),)
        total = sum(samples for _, samples in nodes)
        found = []
        for (a, b), (_, samples) in zip(
            spans([ranks for ranks, _ in nodes]), nodes, strict=True
        ):
            found += [
                samples / total * size / sum(self.sizes[a:b])
                for size in self.sizes[a:b]
            ]
        return tuple(found)

    def peers(self, rank: int) -> range:
        """The ranks that share samples with this one: all, or those of its node."""
        nodes = (range(a, b) for a, b in spans(self.ranks or (len(self.sizes),)))
        return next(node for node in nodes if rank in node)

    def samples(self, total: int) -> tuple[int, ...]:
        """How many of all samples each node has."""
        return apportion(total, tuple(share for _, share in self.nodes))


REPLICATE = Split("replicate")
