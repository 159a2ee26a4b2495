"""Costs of plans on devices that are slower than measured, by the planner's estimates."""

from __future__ import annotations

from hetconv.cost.estimator import StepEstimator
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Mode, Plan
from hetconv.sharding.moves import bytes_per_pair
from hetconv.sharding.param_shards import ParamShards
from hetconv.tracing.graph import Graph

from .make_plan import make_plan
from .rebalance import Factors


class EstimatedCosts:
    """`PlanCosts` of one model on one cluster.

    Args:
        graph: The model, as `capture` returns it.
        profile: Devices and links as they were measured.
        mode: Whether a step trains.
        itemsize: Bytes of an element of a parameter.
        copies: Tensors of a parameter's shape that move with it, itself among them: 4
            for the parameter, its gradient and Adam's two moments.
    """

    def __init__(
        self,
        graph: Graph,
        profile: ClusterProfile,
        mode: Mode,
        itemsize: int = 4,
        copies: int = 4,
    ):
        self._graph, self._profile, self._mode = graph, profile, mode
        self._bytes_per_element = itemsize * copies
        self._estimator = StepEstimator(graph, profile, mode)
        self._slowed: tuple[Factors, StepEstimator] | None = None

    def busy_s(self, plan: Plan) -> tuple[float, ...]:
        """Returns the seconds of a step in which each device does not wait."""
        prediction, _ = self._estimator.estimate(plan.splits)
        return tuple(
            compute_s + communication_s
            for compute_s, communication_s in zip(
                prediction.compute_s, prediction.communication_s, strict=True
            )
        )

    def step_s(self, plan: Plan, factors: Factors) -> float:
        """Returns the seconds of a step of a plan on slowed devices."""
        if self._slowed is None or self._slowed[0] != factors:
            slowed = self._profile.slowed(factors)
            self._slowed = factors, StepEstimator(self._graph, slowed, self._mode)
        return self._slowed[1].estimate(plan.splits)[0].step_s

    def plan_for(self, current: Plan, factors: Factors) -> Plan:
        """Returns the fastest plan on slowed devices; ``current`` if it has its splits."""
        plan = make_plan(self._graph, self._profile.slowed(factors), mode=self._mode)
        return current if plan.splits == current.splits else plan

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
