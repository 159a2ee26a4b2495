"""What steps would have taken on devices as fast as they usually are: steps at one speed tell which plan is faster."""

from __future__ import annotations

from collections.abc import Mapping

from hetconv.candidates import Candidates
from hetconv.graph import Graph
from hetconv.plan import ALONE, Mode, Plan
from hetconv.planner import PLANNED
from hetconv.pricing import Pricer
from hetconv.profile import ClusterProfile
from hetconv.rules import Split

from .race import Seconds, Way
from .rounds import Paced, Round


class Usual:
    """Of a model's steps, as many times as long, or as short, as is predicted for the pulses that there were within."""

    def __init__(self, graph: Graph, profile: ClusterProfile, mode: Mode):
        self._pricer, self._candidates = Pricer(graph, profile, mode), Candidates(graph, profile, mode)

    def __call__(self, ways: Mapping[str, Way], ran: Round) -> Seconds:
        return {name: self.seconds(*self._named(way), ran[name]) for name, way in ways.items()}

    def seconds(self, name: str, splits: Mapping[str, Split], ran: Paced) -> float:
        """Of a step of the plan of this name, see `Pricer.of`."""
        usual, then = (self._pricer.step_s(name, splits, pulse_s) for pulse_s in ((), ran.pulse_s))
        return ran.seconds * (usual / then)

    def _named(self, way: Way) -> tuple[str, Mapping[str, Split]]:
        if isinstance(way, Plan):
            return PLANNED, way.splits
        splits = self._candidates.alone(way.rank)
        assert splits is not None  # it would not have run
        return ALONE, splits
