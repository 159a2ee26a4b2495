"""Costs of plans on devices that are slower than measured, by the planner's estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from hetconv.cost.estimator import StepEstimator
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Mode, Plan
from hetconv.sharding.layer_rules import Conv, Linear
from hetconv.sharding.layout import spans
from hetconv.sharding.moves import bytes_per_pair
from hetconv.sharding.param_shards import ParamShards
from hetconv.sharding.split import Split
from hetconv.tracing.graph import Graph

from .make_plan import make_plan
from .partition import split_of
from .rebalance import Factors

KEPT_ESTIMATORS = 4
LITTLE_WORK = 0.05
"""A rank with less than this part of the layers is busy with other things most of the time."""


class EstimatedCosts:
    """`PlanCosts` of one model on one cluster.

    Args:
        graph: The model, as `capture` returns it.
        profile: Devices and links as they were measured.
        mode: Whether a step trains.
        itemsize: Bytes of an element of a parameter.
        copies: Tensors of a parameter's shape that move with it, itself among them: 4
            for the parameter, its gradient and Adam's two moments.
        horizon_steps: Steps within which a change must pay for its migration.
    """

    def __init__(
        self,
        graph: Graph,
        profile: ClusterProfile,
        mode: Mode,
        itemsize: int = 4,
        copies: int = 4,
        horizon_steps: int = 500,
    ):
        self._graph, self._profile, self._mode = graph, profile, mode
        self._bytes_per_element = itemsize * copies
        self._horizon_steps = horizon_steps
        self._made_for: dict[str, Factors] = {}  # by digest of a plan
        self._estimator = StepEstimator(graph, profile, mode)
        self._slowed: dict[Factors, StepEstimator] = {}  # the last ones

    def busy_s(self, plan: Plan) -> tuple[float, ...]:
        """Returns the seconds of a step in which each device does not wait.

        It is 0 for a device that has little work, whose seconds tell nothing of its speed.
        """
        prediction, _ = self._estimator.estimate(plan.splits)
        return tuple(
            0.0 if has_little_work(plan, rank) else busy_s
            for rank, busy_s in enumerate(prediction.busy_s)
        )

    def step_s(self, plan: Plan, factors: Factors) -> float:
        """Returns the seconds of a step of a plan on slowed devices."""
        if factors not in self._slowed:
            if len(self._slowed) == KEPT_ESTIMATORS:
                del self._slowed[next(iter(self._slowed))]
            slowed = self._profile.slowed(factors)
            self._slowed[factors] = StepEstimator(self._graph, slowed, self._mode)
        return self._slowed[factors].estimate(plan.splits)[0].step_s

    def gain(self, current: Plan, new: Plan, factors: Factors) -> float:
        """Returns the part of a step that another plan saves on slowed devices.

        For the devices that the current plan was chosen for it was the best one, maybe by
        measurement. What another plan is predicted to save on them is an error of the
        prediction, and does not count.
        """
        then, now = (
            self.step_s(new, f) / self.step_s(current, f)
            for f in (self._chosen_for(current, factors), factors)
        )
        return 1 - now / min(then, 1.0)

    def plan_for(self, current: Plan, factors: Factors) -> Plan:
        """Returns the plan that saves most on slowed devices, with its migration.

        It is the one that `make_plan` finds, or the current one with other sizes of the
        same kinds, or ``current`` itself.
        """
        tuned = make_plan(self._graph, self._profile.slowed(factors), mode=self._mode)
        horizon_s = self._horizon_steps * self.step_s(current, factors)
        found = max(
            (current, self._resized(current, factors), tuned),
            key=lambda plan: (
                self.gain(current, plan, factors) * horizon_s
                - 2 * self.migration_s(current, plan)
            ),
        )
        if found is not current:
            self._made_for[found.digest] = factors
        return found

    def _chosen_for(self, plan: Plan, factors: Factors) -> Factors:
        return self._made_for.get(plan.digest, (1.0,) * len(factors))

    def _resized(self, current: Plan, factors: Factors) -> Plan:
        """Returns a plan of the same kinds, with less for devices that became slower."""
        before = self._chosen_for(current, factors)
        speeds = [then / now for then, now in zip(before, factors, strict=True)]
        return current.with_splits(
            {
                name: _resized(op, current.splits[name], speeds)
                for name, op in self._graph.layers.items()
            }
        )

    def migration_s(self, current: Plan, new: Plan) -> float:
        """Returns the seconds in which parameters move to the slices of another plan."""
        seconds = 0.0
        for name, op in self._graph.layers.items():
            old, held = (
                op.param_shards(plan.splits[name], self._profile.world)
                for plan in (current, new)
            )
            for param in old:
                seconds += self._param_s(old[param], held[param])
        return seconds

    def _param_s(self, old: ParamShards, new: ParamShards) -> float:
        """Returns the seconds in which the slices of one parameter move."""
        if old.boxes == new.boxes:
            return 0.0
        exchange = (old.primary.boxes, new.boxes)
        sent = bytes_per_pair((exchange,), self._bytes_per_element)
        seconds = 0.0
        for (sender, receiver), size in sent.items():
            link = self._profile.link(sender, receiver)
            seconds += link.latency_s + size * link.s_per_byte
        return seconds


def has_little_work(plan: Plan, rank: int) -> bool:
    """Returns whether a rank has next to no share of the layers of a plan."""
    splits = plan.splits.values()
    work = sum(split.shares[rank] if split.shares else 1.0 for split in splits)
    return work < LITTLE_WORK * len(splits)


def _resized(op: Conv | Linear, split: Split, speeds: Sequence[float]) -> Split:
    """Returns a split of the same kind, with shares multiplied by speeds, where it is legal."""
    if not split.sizes:
        return split
    weights = [size * speed for size, speed in zip(split.sizes, speeds, strict=True)]
    bounds = spans([count for count, _ in split.nodes]) if split.nodes else ()
    nodes = tuple(
        (count, round(samples * 1024 * mean(speeds[lo:hi])))
        for (count, samples), (lo, hi) in zip(split.nodes, bounds, strict=True)
    )
    found = split_of(op, split.kind, weights, (split.kind,), nodes)
    return replace(found, whole=split.whole) if found.kind == split.kind else split
