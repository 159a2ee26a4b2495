"""Makes a plan: chooses the splits of a model that have the least predicted step time.

Among all combinations of the layers' `candidates`, the one whose operators and movements
add up to the fewest seconds is found exactly (`table_builder`, `solver.elimination`). Its
shares are then refined on the predicted makespan of the whole step, and it is compared
with splits of the whole model. Of all that fit the memory, the plan is the one that is
predicted to be the fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hetconv.cost.estimator import LayerCost, StepEstimator, gathers
from hetconv.errors import PlanError
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import (
    SINGLE_DEVICE,
    Alternative,
    LayerPlan,
    Mode,
    Plan,
    Prediction,
)
from hetconv.schemas.timeline import Event, Timeline
from hetconv.sharding.layer_rules import Conv
from hetconv.sharding.split import KINDS, Split, SplitKind
from hetconv.tracing.fusion import fusible_functions
from hetconv.tracing.graph import Graph

from .candidates import EVEN, TUNED, Candidates, plan_name, tuned_name
from .memory_limits import Limits, fits, least_memory
from .partition import Splits, split_of, with_whole_sum
from .search import Search

PLANNED, EVEN_PLAN = "planned", "even split, planned"
MAX_REFINEMENTS = 24
# Part of a device's share that one refinement moves to another device.
REFINEMENT_STEP = 1 / 32
MIN_RELATIVE_GAIN = 1e-4  # of a refinement
Estimate = tuple[Prediction, dict[str, LayerCost]]
Estimates = dict[str, Estimate]


def make_plan(
    graph: Graph,
    profile: ClusterProfile,
    *,
    mode: Mode = "train",
    memory_limit: float | Sequence[float] | None = None,
    kinds: Sequence[SplitKind] | None = None,
) -> Plan:
    """Makes the plan of least predicted step time within each device's memory.

    The same arguments give the same plan.

    Args:
        graph: Model, as `capture` returns it.
        profile: Devices and links.
        mode: Whether a step trains.
        memory_limit: Bytes, for all devices or one number for each; by default those of
            the profile.
        kinds: Kinds of split that may be chosen; by default all. A layer for which none
            of them is legal is replicated.

    Returns:
        The plan.

    Raises:
        PlanError: If nothing fits the memory; the message names the least that would
            do.
        SplitError: If a kind is not known.

    Examples:
        >>> graph = capture(model, torch.zeros(8, 3, 224, 224))
        >>> profile = ClusterProfile.from_devices("2xT4", link="pcie3-x16")
        >>> make_plan(graph, profile).save("plan.json")
    """
    comparison = _Comparison(graph, profile, mode, memory_limit, kinds)
    chosen, events = comparison.chosen, list[Event]()
    prediction, costs = comparison.estimates[chosen]
    splits = comparison.splits[chosen]
    alternatives: Mapping[str, tuple[Alternative, ...]] = {}
    if not chosen.startswith(SINGLE_DEVICE):  # where no layer has a choice
        alternatives = comparison.search.alternatives(splits)
    comparison.estimator.of(chosen).estimate(splits, events.append)
    return Plan(
        profile.names,
        mode,
        graph.model,
        graph.input_shapes,
        _layer_plans(graph, profile, splits, costs, alternatives),
        chosen,
        prediction,
        _step_s_by_kind_of_plan(comparison.estimates),
        profile.estimated,
        profile.tiles,
        gathers(graph, splits, profile.world, mode),
        Timeline.of(events),
        profile.memory_format,
    )


class Contender(NamedTuple):
    """A split of the whole model that fits the memory.

    Attributes:
        name: Name of the plan.
        splits: Split of each layer.
        predicted: Predicted step.
        costs: Cost of each layer.
    """

    name: str
    splits: Splits
    predicted: Prediction
    costs: Mapping[str, LayerCost]


def contenders(
    graph: Graph, profile: ClusterProfile, *, mode: Mode = "train"
) -> list[Contender]:
    """Lists what `make_plan` chooses among, without repetitions.

    Args:
        graph: Model.
        profile: Devices and links.
        mode: Whether a step trains.

    Returns:
        First what `make_plan` chooses, then the others, the fastest first.
    """
    comparison = _Comparison(graph, profile, mode, None, None)
    fitting = comparison.fitting()
    order = sorted(
        fitting, key=lambda name: (name != comparison.chosen, fitting[name].step_s)
    )
    found: list[Contender] = []
    for name in order:
        splits = comparison.splits[name]
        if all(splits != other.splits for other in found):
            found.append(Contender(name, splits, *comparison.estimates[name]))
    return found


class _Comparison:
    """Comparison of whole-model splits, searched ones and tuned ones."""

    def __init__(
        self,
        graph: Graph,
        profile: ClusterProfile,
        mode: Mode,
        memory_limit: float | Sequence[float] | None,
        kinds: Sequence[SplitKind] | None,
    ):
        if not graph.layers:
            raise PlanError(
                f"{graph.model} has no convolution or linear layer that could be split"
            )
        allowed = tuple(kinds) if kinds is not None else KINDS
        for kind in allowed:  # raises SplitError for a kind that is not known
            Split(kind, () if kind == "replicate" else (1,))
        self.limits = _limits(profile, memory_limit)
        self.candidates = Candidates(graph, profile, mode, allowed)
        self.estimator = StepEstimator(graph, profile, mode)
        self.splits = self.candidates.whole_models(self.limits)
        self.estimates: Estimates = {
            name: self.estimator.of(name).estimate(splits)
            for name, splits in self.splits.items()
        }
        self.search = Search.within(self.candidates, self.estimator, self.limits)
        self._add(PLANNED, self.search.best(self.limits))
        self._add(EVEN_PLAN, self._even_search().best(self.limits))
        self._correct_by_measurements()
        if not self.fitting():
            least = least_memory(self.search.tables, self.limits, self.search.memory)
            raise PlanError(
                f"no split fits: the leanest needs {_gigabytes(least)} GB per device, "
                f"but there are {_gigabytes(self.limits)} GB"
            )
        self.chosen = self._choose()

    def _even_search(self) -> Search:
        proportions = self.candidates.shared_proportions(even=True)
        choices = self.candidates.choices(proportions, balanced=False)
        return Search(self.candidates, self.estimator, choices)

    def _add(self, name: str, splits: Splits | None) -> None:
        if splits is not None:
            self.splits[name] = splits
            self.estimates[name] = self.estimator.estimate(splits)

    def fitting(self) -> dict[str, Prediction]:
        """Returns the predictions of all that fits the memory, by name."""
        return {
            name: prediction
            for name, (prediction, _) in self.estimates.items()
            if fits(prediction.memory_bytes, self.limits)
        }

    def _correct_by_measurements(self) -> None:
        """Replaces predicted step times where whole steps were measured.

        A tuned ratio gains what it gained over the computed ratio when they were
        measured side by side; it never loses. A tuned plan, the single device and the
        even split beside it take what they took.
        """
        for tuned in self.candidates.tuned():
            weights = tuned.computed_weights
            computed = self.candidates.whole(tuned.kind, weights)
            prediction, _ = self.estimator.estimate(computed)
            gain = min(tuned.step_s / tuned.computed_step_s, 1.0)
            self._set_step_s(tuned_name(tuned), prediction.step_s * gain)
        if (best := self.candidates.tuned_plan()) is not None:
            self._set_step_s(plan_name(best), best.step_s)
            self._set_step_s(best.alone, best.alone_s)
            self._set_step_s(best.even, best.even_s)

    def _set_step_s(self, name: str | None, step_s: float | None) -> None:
        if name in self.estimates and step_s is not None:
            prediction, costs = self.estimates[name]
            self.estimates[name] = replace(prediction, step_s=step_s), costs

    def _choose(self) -> str:
        """Returns the name of the plan that was measured or is predicted the fastest."""
        fitting, tuned = self.fitting(), self.candidates.tuned_plan()
        if tuned is not None and plan_name(tuned) in fitting:
            return plan_name(tuned)

        def step_s_and_preference(name: str) -> tuple[float, bool, bool]:
            single, is_tuned = name.startswith(SINGLE_DEVICE), name.startswith(TUNED)
            return fitting[name].step_s, not single, not is_tuned

        fastest = min(fitting, key=step_s_and_preference)
        if fastest.startswith((SINGLE_DEVICE, TUNED)):
            return fastest
        splits = self.splits[fastest]
        refined, estimate = self._refined(splits, self.estimates[fastest])
        if refined is splits:
            return fastest
        self.splits[PLANNED], self.estimates[PLANNED] = refined, estimate
        return PLANNED

    def _refined(self, splits: Splits, estimate: Estimate) -> tuple[Splits, Estimate]:
        """Moves work from the busiest device to the least busy one while that helps.

        The search balances every operator by itself. But devices go on by themselves,
        so what counts is the sum of each device's work.
        """
        for _ in range(MAX_REFINEMENTS):
            prediction, costs = estimate
            compute_s = prediction.compute_s
            ranks = range(len(compute_s))
            busiest = max(ranks, key=compute_s.__getitem__)
            idlest = min(ranks, key=compute_s.__getitem__)
            group = _heaviest_split(splits, costs, busiest, idlest)
            if group is None:
                break
            moved = _moved_share(group, busiest, idlest)
            tried = {
                name: self._resized(name, group, moved) if split == group else split
                for name, split in splits.items()
            }
            new_estimate = self.estimator.estimate(tried)
            new = new_estimate[0]
            if new.step_s >= prediction.step_s * (1 - MIN_RELATIVE_GAIN):
                break
            if not fits(new.memory_bytes, self.limits):
                break
            splits, estimate = tried, new_estimate
        return splits, estimate

    def _resized(self, name: str, split: Split, weights: Sequence[float]) -> Split:
        """Splits a layer as before, but in other proportions."""
        op, kinds = self.candidates.graph.layers[name], self.candidates.kinds
        resized = split_of(op, split.kind, weights, kinds, split.nodes)
        return with_whole_sum(resized) if split.whole else resized


def _heaviest_split(
    splits: Splits, costs: Mapping[str, LayerCost], source: int, target: int
) -> Split | None:
    """Finds the split of most work among those that two devices share."""
    weights: dict[Split, float] = {}
    for name, split in splits.items():
        shared = split.sizes and split.sizes[source] and split.sizes[target]
        if shared and target in split.peers(source):
            weights[split] = weights.get(split, 0.0) + max(costs[name].forward_s)
    return max(
        weights,
        default=None,
        key=lambda split: (weights[split], split.kind, split.sizes, split.nodes),
    )


def _moved_share(split: Split, source: int, target: int) -> list[float]:
    """Returns the sizes of a split after a small share was moved to another device."""
    weights = [float(size) for size in split.sizes]
    moved = sum(weights[rank] for rank in split.peers(source)) * REFINEMENT_STEP
    moved = min(max(moved, 1.0), weights[source])
    weights[source] -= moved
    weights[target] += moved
    return weights


def _layer_plans(
    graph: Graph,
    profile: ClusterProfile,
    splits: Splits,
    costs: Mapping[str, LayerCost],
    alternatives: Mapping[str, tuple[Alternative, ...]],
) -> dict[str, LayerPlan]:
    fusible, layers = fusible_functions(graph), {}
    for name, op in graph.layers.items():
        split, cost = splits[name], costs[name]
        chunks = 1
        if isinstance(op, Conv) and split.kind == "filter":
            chunks = profile.chunks_of(op.spec, split.sizes)
        layers[name] = LayerPlan(
            op,
            split,
            cost.forward_s,
            cost.backward_s,
            cost.sent_bytes,
            fusible.get(name, ()),
            chunks,
            alternatives.get(name, ()),
            cost.memory_bytes,
        )
    return layers


def _gigabytes(sizes: Sequence[float]) -> str:
    return ", ".join(f"{size / 1e9:.3g}" for size in sizes)


def _limits(profile: ClusterProfile, given: float | Sequence[float] | None) -> Limits:
    if given is None:
        return tuple(d.memory_bytes for d in profile.devices)
    limits = tuple(given) if isinstance(given, Sequence) else (given,) * profile.world
    if len(limits) != profile.world:
        raise PlanError(
            f"{len(limits)} memory limits were given for {profile.world} devices; give "
            "one for each, or one"
        )
    return limits


def _step_s_by_kind_of_plan(estimates: Estimates) -> dict[str, float]:
    """Predicted seconds of the best single device, the best even split, and the others."""
    found: dict[str, float] = {}
    for name, (prediction, _) in estimates.items():
        short = next((s for s in (SINGLE_DEVICE, EVEN) if name.startswith(s)), name)
        found[short] = min(prediction.step_s, found.get(short, float("inf")))
    return found
