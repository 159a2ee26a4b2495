"""Candidates of the planner: splits of every layer, and whole models to compare with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import chain

from hetconv.cost.operator_cost import axis_of, layer_curve
from hetconv.errors import SplitError
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import Axis, Curve
from hetconv.schemas.plan import SINGLE_DEVICE, Mode
from hetconv.schemas.tuning_results import TunedPlan, TunedRatio
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

# Names of plans.
EVEN = "even split"
TUNED = "tuned"
ALTERNATING = "uneven filter and channel split"
# A device that takes this many times as long as another one is of a slower kind.
SLOWER_KIND_RATIO = 1.1
# Kinds by which all work may go to one device, those that move least first.
SINGLE_DEVICE_KINDS: tuple[SplitKind, ...] = (
    "sample",
    "depth",
    "height",
    "width",
    "filter",
)


class Candidates:
    """Candidate splits of one model on one cluster.

    Args:
        graph: Model.
        profile: Devices and links.
        mode: Whether a step trains.
        kinds: Kinds of split that are allowed.
    """

    def __init__(
        self,
        graph: Graph,
        profile: ClusterProfile,
        mode: Mode,
        kinds: Sequence[SplitKind] = KINDS,
    ):
        self.graph, self.profile, self.mode = graph, profile, mode
        self.kinds = tuple(kinds)
        self._dtypes = {
            n.layer: graph.values[n.outputs[0]].dtype
            for n in graph.nodes
            if n.layer is not None
        }
        self._curves: dict[tuple[Conv | Linear, Axis], list[Curve]] = {}

    @cached_property
    def ranks_by_node(self) -> tuple[int, ...]:
        """Number of ranks of each node; empty where no hierarchical split is possible."""
        nodes = self.profile.nodes
        in_order = [*chain(*nodes)] == [*range(self.profile.world)]
        has_levels = len(nodes) > 1 and max(map(len, nodes)) > 1
        splits_samples = "sample" in self.kinds and has_dimension(self.graph, "sample")
        if in_order and has_levels and splits_samples:
            return tuple(map(len, nodes))
        return ()

    @property
    def kinds_within_nodes(self) -> list[SplitKind]:
        """Kinds by which a hierarchical split may split within nodes."""
        if not self.ranks_by_node:
            return []
        allowed = (kind for kind in KINDS_WITHIN_NODES if kind in self.kinds)
        return [kind for kind in allowed if has_dimension(self.graph, kind)]

    def curves(self, name: str, axis: Axis) -> list[Curve]:
        """Returns seconds by share of a layer on each device, all passes together.

        Args:
            name: Layer.
            axis: What is shared.
        """
        op = self.graph.layers[name]
        if (op, axis) not in self._curves:
            passes = (False, True) if self.mode == "train" else (False,)
            dtype = self._dtypes[name]
            self._curves[op, axis] = [
                added((layer_curve(device, op, axis, b, dtype), 1) for b in passes)
                for device in self.profile.devices
            ]
        return self._curves[op, axis]

    def model_curves(self, axis: Axis) -> list[Curve]:
        """Sums the curves of all convolutions, or of all layers if there are none.

        Args:
            axis: What is shared.

        Returns:
            Seconds by share, on each device.
        """
        layers = self.graph.layers
        names = [n for n, op in layers.items() if isinstance(op, Conv)] or list(layers)
        name_of = {layers[n]: n for n in reversed(names)}
        counts = Counter(layers[n] for n in names)
        by_op = [(self.curves(name_of[op], axis), n) for op, n in counts.items()]
        return [
            added((curves[rank], n) for curves, n in by_op)
            for rank in range(self.profile.world)
        ]

    def shared_proportions(self, *, even: bool = False) -> list[Weights]:
        """Returns proportions that all layers may share, so that neighbours align.

        There is one for each group of the fastest devices, and one for all devices.

        Args:
            even: Whether the devices of a group get equal shares; otherwise the shares
                balance the whole model.
        """
        curves, world = self.model_curves("pixels"), self.profile.world
        seconds = [curve.at(1.0) for curve in curves]
        order = sorted(range(world), key=lambda rank: (seconds[rank], rank))
        if even:
            counts = powers_of_two(world)
        else:
            counts = group_sizes([seconds[rank] for rank in order])
        found: list[Weights] = []
        for count in (*counts, world):
            group = order[:count]
            shares = [1.0] * count if even else balance([curves[r] for r in group])
            by_rank = dict(zip(group, shares, strict=True))
            found.append(tuple(by_rank.get(rank, 0.0) for rank in range(world)))
        return list(dict.fromkeys(found))

    def choices(
        self, proportions: Sequence[Weights], *, balanced: bool = True
    ) -> dict[str, tuple[Split, ...]]:
        """Lists the candidate splits of each layer.

        These are all kinds in all given proportions, and hierarchical splits in the
        last ones.

        Args:
            proportions: Proportions that all layers share.
            balanced: Whether to add the split of each kind that balances the layer.

        Returns:
            Candidates by layer; equal layers have the same object.
        """
        by_kind = {
            kind: [aligned(self.graph, kind, weights) for weights in proportions]
            for kind in self.kinds
            if kind != "replicate"
        }
        nodes = nodes_by(proportions[-1], self.ranks_by_node)
        within_nodes = {
            kind: aligned(self.graph, kind, proportions[-1], self.ranks_by_node)
            for kind in self.kinds_within_nodes
        }
        known: dict[Conv | Linear, tuple[Split, ...]] = {}
        for name, op in self.graph.layers.items():
            if op in known:
                continue
            found: list[Split] = []
            for kind, grids in by_kind.items():
                splits = [split_of(op, kind, grid, self.kinds) for grid in grids]
                if balanced:
                    splits.append(self._balanced_split(name, op, kind))
                found += [*splits, *map(with_whole_sum, splits)]
            found += [
                split_of(op, inner, grid, self.kinds, nodes)
                for inner, grid in within_nodes.items()
            ]
            legal = [s for s in dict.fromkeys(found) if s.kind != "replicate"]
            if "replicate" in self.kinds or not legal:
                legal.insert(0, REPLICATE)
            known[op] = tuple(legal)
        return {name: known[op] for name, op in self.graph.layers.items()}

    def _balanced_split(self, name: str, op: Conv | Linear, kind: SplitKind) -> Split:
        extent = extent_of(op, kind)
        if not extent:
            return REPLICATE
        world = self.profile.world
        curves = self._corrected(self.curves(name, axis_of(kind)), kind)
        grain = granularity(op, kind, extent, world)
        return checked(op, kind, balanced_sizes(curves, extent, grain), world)

    def whole_models(self, limits: Sequence[float] = ()) -> dict[str, Splits]:
        """Lists splits of the whole model that a plan is compared with.

        These are each device alone, each kind evenly and balanced, and what was tuned.

        Args:
            limits: Bytes of memory of each device. Of equal devices with equal limits,
                only the first one is listed alone.

        Returns:
            Splits by name.
        """
        found = self._single_devices(limits)
        replicated = dict.fromkeys(self.graph.layers, REPLICATE)
        even = (1.0,) * self.profile.world
        for kind in self.kinds:
            if kind == "replicate":
                found["replicated"] = replicated
            elif has_dimension(self.graph, kind):
                found[f"{EVEN} by {kind}"] = self.whole(kind, even)
                found[f"uneven {kind} split"] = self.balanced(kind)
        for kind in self.kinds_within_nodes:
            ranks, weights = self.ranks_by_node, self.balance(kind)
            found[f"{EVEN} by sample x {kind}"] = self.whole(kind, even, ranks)
            found[f"uneven sample x {kind} split"] = self.whole(kind, weights, ranks)
        if {"filter", "channel"} <= set(self.kinds):
            found[ALTERNATING] = self._alternating()
        for tuned in self.tuned():
            found[tuned_name(tuned)] = self.whole(tuned.kind, tuned.weights)
        if (best := self.tuned_plan()) is not None:
            found[plan_name(best)] = dict(best.splits)
        return found or {"replicated": replicated}

    def _single_devices(self, limits: Sequence[float]) -> dict[str, Splits]:
        found: dict[str, Splits] = {}
        seen = []
        for rank, device in enumerate(self.profile.devices):
            device_and_limit = device, limits[rank] if limits else None
            if device_and_limit in seen:
                continue
            seen.append(device_and_limit)
            if (splits := self.single_device(rank)) is not None:
                found[f"{SINGLE_DEVICE} ({rank}: {device.name})"] = splits
        return found

    def single_device(self, rank: int) -> Splits | None:
        """Gives all work to one device, as a split in which the others get nothing.

        Args:
            rank: Rank of the device.

        Returns:
            The splits; None if no kind that is allowed can express it.
        """
        weights = tuple(float(r == rank) for r in range(self.profile.world))
        for kind in SINGLE_DEVICE_KINDS:
            exists = kind not in SPATIAL_KINDS or has_dimension(self.graph, kind)
            if kind in self.kinds and exists:
                return self.whole(kind, weights)
        return None

    def whole(
        self, kind: SplitKind, weights: Sequence[float], ranks: tuple[int, ...] = ()
    ) -> Splits:
        """Splits the whole model; see `whole_model`."""
        return whole_model(self.graph, kind, weights, self.kinds, ranks)

    def balanced(self, kind: SplitKind) -> Splits:
        """Splits the whole model in balanced proportions.

        Filters and channels are balanced layer by layer; other kinds have one
        proportion for all layers, so that neighbours align.

        Args:
            kind: Kind of split.
        """
        if kind in ("filter", "channel"):
            return {
                name: self._balanced_split(name, op, kind)
                for name, op in self.graph.layers.items()
            }
        return self.whole(kind, self.balance(kind))

    def balance(self, kind: SplitKind) -> Weights:
        """Returns the proportions that balance all convolutions together.

        Args:
            kind: Kind of split, whose measured corrections apply.
        """
        return balance(self._corrected(self.model_curves("pixels"), kind))

    def _corrected(self, curves: Sequence[Curve], kind: SplitKind) -> list[Curve]:
        """Applies the factors that whole steps under such splits have shown."""
        return [
            added([(curve, device.corrections.get(kind, 1.0))])
            for curve, device in zip(curves, self.profile.devices, strict=True)
        ]

    def _alternating(self) -> Splits:
        """Splits by filter, and by channel where a layer reads the result of such a split.

        Source: Moreno-Alvarez et al., 2021.
        """
        chosen: Splits = {}
        layer_of: dict[int, str] = {}  # the last layer before each value
        for node in self.graph.nodes:
            before = next((layer_of[i] for i in node.inputs if i in layer_of), None)
            if node.layer is not None:
                after_filter = before is not None and chosen[before].kind == "filter"
                kind: SplitKind = "channel" if after_filter else "filter"
                op = self.graph.layers[node.layer]
                split = self._balanced_split(node.layer, op, kind)
                chosen.setdefault(node.layer, split)
                before = node.layer
            if before is not None:
                layer_of |= dict.fromkeys(node.outputs, before)
        return chosen

    def tuned(self) -> list[TunedRatio]:
        """Returns the ratios that were tuned for this model, mode and cluster."""
        return [
            tuned
            for tuned in self.profile.tuned
            if (tuned.graph, tuned.mode) == (self.graph.digest, self.mode)
            and tuned.kind in self.kinds
            and len(tuned.weights) == self.profile.world
        ]

    def tuned_plan(self) -> TunedPlan | None:
        """Returns the plan that was measured to be the fastest for this model and mode.

        It is None if there is none, or if it has kinds of split that are not allowed.
        """
        for tuned in self.profile.plans:
            same_model = (tuned.graph, tuned.mode) == (self.graph.digest, self.mode)
            if same_model and self._allows(tuned):
                return tuned
        return None

    def _allows(self, tuned: TunedPlan) -> bool:
        allowed = {*self.kinds, "replicate"}
        if tuned.splits.keys() != self.graph.layers.keys():
            return False
        for name, split in tuned.splits.items():
            if split.kind not in allowed or (split.nodes and "sample" not in allowed):
                return False
            try:
                self.graph.layers[name].check(split, self.profile.world)
            except SplitError:
                return False
        return True


def powers_of_two(below: int) -> list[int]:
    """Lists the powers of two below a number."""
    return [1 << i for i in range(below.bit_length()) if 1 << i < below]


def group_sizes(seconds: Sequence[float]) -> list[int]:
    """Lists how many of the fastest devices may work without the others.

    A group leaves out the slowest kinds of devices, or has a power of two of devices:
    fewer than half of them, if leaving out kinds gives the larger groups.

    Args:
        seconds: Seconds of each device for the same work, ascending.
    """
    world = len(seconds)
    by_kind = {
        n for n in range(1, world) if seconds[n] > SLOWER_KIND_RATIO * seconds[n - 1]
    }
    covers_half = any(2 * n >= world for n in by_kind)
    below = (world + 1) // 2 if covers_half else world
    return sorted({*powers_of_two(below), *by_kind})


def tuned_name(tuned: TunedRatio) -> str:
    """Returns the name of the plan that has a tuned ratio."""
    return f"{TUNED} {tuned.kind} split"


def plan_name(tuned: TunedPlan) -> str:
    """Returns the name of a tuned plan."""
    return tuned.name if tuned.name.startswith(SINGLE_DEVICE) else f"{TUNED} plan"
