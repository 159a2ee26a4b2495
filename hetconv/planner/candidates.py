"""The ways of splitting that the planner chooses among: of every layer, and of whole
models to compare with. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import chain

from hetconv.cost.operator_cost import axis_of, layer_curve
from hetconv.errors import SplitError
from hetconv.schemas.cluster_profile import Axis, ClusterProfile, Curve, TunedRatio
from hetconv.schemas.plan import SINGLE_DEVICE, Mode
from hetconv.schemas.tuning_results import TunedPlan
from hetconv.sharding.layer_rules import Conv, Linear
from hetconv.sharding.split import (
    KINDS,
    KINDS_WITHIN_NODES,
    REPLICATE,
    SPATIAL_KINDS,
    Split,
    SplitKind,
)
from hetconv.tracing.graph import Graph

from .load_balance import added, balance, balanced_sizes
from .partition import (
    Splits,
    Weights,
    aligned,
    checked,
    extent_of,
    granularity,
    has_dimension,
    nodes_by,
    split_of,
    whole_model,
    with_whole_sum,
)

EVEN = "even split"
TUNED = "tuned"
ALTERNATING = "uneven filter and channel split"
CLEARLY = 1.1  # times as long as another device takes one that is of a slower kind
ALL_ON_ONE_DEVICE: tuple[SplitKind, ...] = (
    "sample",
    "depth",
    "height",
    "width",
    "filter",
)  # for one device: least moved first


class Candidates:
    """For one model, mode and cluster, of the kinds that are allowed."""

    def __init__(
        self,
        graph: Graph,
        profile: ClusterProfile,
        mode: Mode,
        kinds: Sequence[SplitKind] = KINDS,
    ):
        self.graph, self.profile, self.mode, self.kinds = (
            graph,
            profile,
            mode,
            tuple(kinds),
        )
        self._dtypes = {
            n.layer: graph.values[n.outputs[0]].dtype
            for n in graph.nodes
            if n.layer is not None
        }
        self._curves: dict[tuple[Conv | Linear, Axis], list[Curve]] = {}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """How many ranks each node has, where samples can be cut across them and
        something else within.
        """
        nodes = self.profile.nodes
        in_order = [*chain(*nodes)] == [*range(self.profile.world)]
        fit = in_order and len(nodes) > 1 and max(map(len, nodes)) > 1
        return (
            tuple(map(len, nodes))
            if fit and "sample" in self.kinds and has_dimension(self.graph, "sample")
            else ()
        )

    @property
    def inner(self) -> list[SplitKind]:
        """The kinds that a node may share its samples by."""
        return [
            kind
            for kind in KINDS_WITHIN_NODES
            if self.ranks and kind in self.kinds and has_dimension(self.graph, kind)
        ]

    def curves(self, name: str, axis: Axis) -> list[Curve]:
        """Seconds of a layer by share on each device, all passes together."""
        op = self.graph.layers[name]
        if (op, axis) not in self._curves:
            passes = (False, True) if self.mode == "train" else (False,)
            self._curves[op, axis] = [
                added(
                    (layer_curve(d, op, axis, b, self._dtypes[name]), 1) for b in passes
                )
                for d in self.profile.devices
            ]
        return self._curves[op, axis]

    def model_curves(self, axis: Axis) -> list[Curve]:
        """Of all convolutions together, or of all layers where there is none."""
        layers = self.graph.layers
        names = [n for n, op in layers.items() if isinstance(op, Conv)] or list(layers)
        first = {layers[n]: n for n in reversed(names)}
        count = Counter(layers[n] for n in names)
        each = [(self.curves(first[op], axis), n) for op, n in count.items()]
        return [
            added((curves[d], n) for curves, n in each)
            for d in range(self.profile.world)
        ]

    def shared_proportions(self, *, even: bool = False) -> list[Weights]:
        """Proportions that all layers share, so that neighbours align: of groups of the
        fastest devices, and of all.

        Balanced over the whole model, or even.
        """
        curves, world = self.model_curves("pixels"), self.profile.world
        order = sorted(range(world), key=lambda d: (curves[d].at(1.0), d))
        counts = (
            powers_of_two(world)
            if even
            else group_sizes([curves[d].at(1.0) for d in order])
        )
        groups = [order[:n] for n in (*counts, world)]
        found: list[Weights] = []
        for group in groups:
            shares = [1.0] * len(group) if even else balance([curves[d] for d in group])
            by_device = dict(zip(group, shares, strict=True))
            found.append(tuple(by_device.get(d, 0.0) for d in range(world)))
        return list(dict.fromkeys(found))

    def choices(
        self, pool: Sequence[Weights], *, own: bool = True
    ) -> dict[str, tuple[Split, ...]]:
        """Of each layer: every kind in every proportion of the pool and, if ``own``, in
        those that suit it best.

        With nodes that a split of two levels may have, also the last proportions of the
        pool in each kind within nodes. Equal layers get the same object.
        """
        known: dict[Conv | Linear, tuple[Split, ...]] = {}
        cuts = {
            k: [aligned(self.graph, k, weights) for weights in pool]
            for k in self.kinds
            if k != "replicate"
        }
        nodes = nodes_by(pool[-1], self.ranks)
        inner = {k: aligned(self.graph, k, pool[-1], self.ranks) for k in self.inner}
        for name, op in self.graph.layers.items():
            if op not in known:
                found: list[Split] = []
                for kind, grids in cuts.items():
                    own_kind = [split_of(op, kind, grid, self.kinds) for grid in grids]
                    own_kind += [self._suited(name, op, kind)] if own else []
                    found += [*own_kind, *map(with_whole_sum, own_kind)]
                found += [
                    split_of(op, kind, grid, self.kinds, nodes)
                    for kind, grid in inner.items()
                ]
                legal = [s for s in dict.fromkeys(found) if s.kind != "replicate"]
                whole = [REPLICATE] if "replicate" in self.kinds or not legal else []
                known[op] = (*whole, *legal)
        return {name: known[op] for name, op in self.graph.layers.items()}

    def _suited(self, name: str, op: Conv | Linear, kind: SplitKind) -> Split:
        extent = extent_of(op, kind)
        if extent is None or extent < 1:
            return REPLICATE
        grain = granularity(op, kind, extent, self.profile.world)
        curves = self._corrected(self.curves(name, axis_of(kind)), kind)
        return checked(
            op, kind, balanced_sizes(curves, extent, grain), self.profile.world
        )

    def whole_models(self, limits: Sequence[float] = ()) -> dict[str, Splits]:
        """What a plan is compared with: each device alone, and each kind evenly,
        balanced, and as it was tuned.

        Of equal devices with equal ``limits``, bytes of memory, only the first one is alone.
        """
        world = self.profile.world
        found: dict[str, Splits] = {}
        known = [
            (device, limits[rank] if limits else None)
            for rank, device in enumerate(self.profile.devices)
        ]
        for rank, device in enumerate(self.profile.devices):
            if (
                known.index(known[rank]) == rank
                and (alone := self.single_device(rank)) is not None
            ):
                found[f"{SINGLE_DEVICE} ({rank}: {device.name})"] = alone
        for kind in self.kinds:
            if kind == "replicate":
                found.setdefault(
                    "replicated", dict.fromkeys(self.graph.layers, REPLICATE)
                )
            elif has_dimension(self.graph, kind):
                found[f"{EVEN} by {kind}"] = self.whole(kind, (1.0,) * world)
                found[f"uneven {kind} split"] = self.balanced(kind)
        for kind in self.inner:
            found[f"{EVEN} by sample x {kind}"] = self.whole(
                kind, (1.0,) * world, self.ranks
            )
            found[f"uneven sample x {kind} split"] = self.whole(
                kind, self.balance(kind), self.ranks
            )
        if {"filter", "channel"} <= set(self.kinds):
            found[ALTERNATING] = self._pairs()
        for tuned in self.tuned():
            found[tuned_name(tuned)] = self.whole(tuned.kind, tuned.weights)
        if (best := self.tuned_plan()) is not None:
            found[plan_name(best)] = dict(best.splits)
        return found or {"replicated": dict.fromkeys(self.graph.layers, REPLICATE)}

    def single_device(self, rank: int) -> Splits | None:
        """All on one device, written as a cut into one part and nothing; none if no
        kind that may be has a place.
        """
        kind = next(
            (
                k
                for k in ALL_ON_ONE_DEVICE
                if k in self.kinds
                and (k not in SPATIAL_KINDS or has_dimension(self.graph, k))
            ),
            None,
        )
        weights = tuple(float(r == rank) for r in range(self.profile.world))
        return self.whole(kind, weights) if kind is not None else None

    def whole(
        self, kind: SplitKind, weights: Sequence[float], ranks: tuple[int, ...] = ()
    ) -> Splits:
        return whole_model(self.graph, kind, weights, self.kinds, ranks)

    def balanced(self, kind: SplitKind) -> Splits:
        """Samples and space in one proportion for the whole model, so that neighbours
        align; the others per layer.
        """
        if kind in ("filter", "channel"):
            return {
                name: self._suited(name, op, kind)
                for name, op in self.graph.layers.items()
            }
        return self.whole(kind, self.balance(kind))

    def balance(self, kind: SplitKind) -> Weights:
        """Of all convolutions together."""
        return balance(self._corrected(self.model_curves("pixels"), kind))

    def _corrected(self, curves: Sequence[Curve], kind: SplitKind) -> list[Curve]:
        """By what was learnt of each device in whole steps under such splits."""
        factors = (device.corrections.get(kind, 1.0) for device in self.profile.devices)
        return [
            added([(curve, factor)])
            for curve, factor in zip(curves, factors, strict=True)
        ]

    def _pairs(self) -> Splits:
        """As Moreno-Alvarez et al. (2021): by filter, and by channel what reads the
        result of such a layer.
        """
        chosen: Splits = {}
        source: dict[int, str] = {}
        for node in self.graph.nodes:
            before = next((source[i] for i in node.inputs if i in source), None)
            if node.layer is not None:
                after_filter = before is not None and chosen[before].kind == "filter"
                op = self.graph.layers[node.layer]
                split = self._suited(
                    node.layer, op, "channel" if after_filter else "filter"
                )
                chosen.setdefault(node.layer, split)
                before = node.layer
            if before is not None:
                source |= dict.fromkeys(node.outputs, before)
        return chosen

    def tuned(self) -> list[TunedRatio]:
        """The ratios that were tuned for this very model and mode."""
        own = [
            t
            for t in self.profile.tuned
            if (t.graph, t.mode) == (self.graph.digest, self.mode)
        ]
        return [
            t
            for t in own
            if t.kind in self.kinds and len(t.weights) == self.profile.world
        ]

    def tuned_plan(self) -> TunedPlan | None:
        """What was measured to be the fastest for this very model and mode, if it is of
        the kinds that are allowed.
        """
        own = [
            t
            for t in self.profile.plans
            if (t.graph, t.mode) == (self.graph.digest, self.mode)
        ]
        return next((t for t in own if self._may(t)), None)

    def _may(self, tuned: TunedPlan) -> bool:
        used = {
            kind
            for s in tuned.splits.values()
            for kind in ((s.kind, "sample") if s.nodes else (s.kind,))
        }
        if tuned.splits.keys() != self.graph.layers.keys() or not used <= {
            *self.kinds,
            "replicate",
        }:
            return False
        try:
            for name, split in tuned.splits.items():
                self.graph.layers[name].check(split, self.profile.world)
        except SplitError:
            return False
        return True


def powers_of_two(below: int) -> list[int]:
    return [1 << i for i in range(below.bit_length()) if 1 << i < below]


def group_sizes(seconds: Sequence[float]) -> list[int]:
    """How many of the fastest devices may work without the others; ``seconds`` of the
    same work, ascending.

    All but the slowest kinds of devices; and one, two, four, ...: less than half of
    them where the former are more.
    """
    world = len(seconds)
    kinds = {n for n in range(1, world) if seconds[n] > CLEARLY * seconds[n - 1]}
    enough = (world + 1) // 2 if any(2 * n >= world for n in kinds) else world
    return sorted({*powers_of_two(enough), *kinds})


def tuned_name(tuned: TunedRatio) -> str:
    return f"{TUNED} {tuned.kind} split"


def plan_name(tuned: TunedPlan) -> str:
    return tuned.name if tuned.name.startswith(SINGLE_DEVICE) else f"{TUNED} plan"
