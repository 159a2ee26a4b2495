"""What steps would have taken on devices as fast as they usually are: steps at one speed tell which plan is faster."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from hetconv.autotune.measure.paired_rounds import Paced, Round
from hetconv.cost.estimator import Pricer
from hetconv.planner.candidates import Candidates
from hetconv.planner.make_plan import PLANNED
from hetconv.schemas.plan import ALONE, Plan
from hetconv.sharding.layer_rules import Split

from .race import Seconds, Way


class Usual:
    """Of a model's steps, as many times as long, or as short, as is predicted for the pulses that there were within."""

    def __init__(self, pricer: Pricer):
        self._pricer, self._candidates = pricer, Candidates(pricer.graph, pricer.profile, pricer.mode)
        self._usual_s: dict[Hashable, float] = {}

    def __call__(self, ways: Mapping[str, Way], ran: Round) -> Seconds:
        return {name: self.seconds(*self._named(way), ran[name]) for name, way in ways.items()}

    def seconds(self, name: str, splits: Mapping[str, Split], ran: Paced) -> float:
        """Of a step of the plan of this name, see `Pricer.of`."""
        plan = name, frozenset(splits.items())
        if plan not in self._usual_s:  # the same for all of its steps
            self._usual_s[plan] = self._pricer.step_s(name, splits)
        return ran.seconds * (self._usual_s[plan] / self._pricer.step_s(name, splits, ran.pulse_s))

    def _named(self, way: Way) -> tuple[str, Mapping[str, Split]]:
        if isinstance(way, Plan):
            return PLANNED, way.splits
        splits = self._candidates.alone(way.rank)
        assert splits is not None  # it would not have run
        return ALONE, splits
