"""make_plan: from a captured graph and a cluster profile to the plan with the least
predicted step time. Pure.

Among all combinations of the layers' `candidates`, the one whose operators and
movements add up to the fewest seconds is found exactly (`table_builder`,
`solver.elimination`). Its shares are then refined on the predicted makespan of the
whole step, and it is compared with whole-model splits: what is predicted fastest of all
that fits the memory is the plan.
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
from hetconv.sharding.layer_rules import Conv
from hetconv.sharding.split import KINDS, Split, SplitKind
from hetconv.tracing.fusion import fusible_functions
from hetconv.tracing.graph import Graph

from .candidates import EVEN, TUNED, Candidates, plan_name, tuned_name
from .memory_limits import Limits, least_memory
from .partition import Splits, split_of, with_whole_sum
from .search import Search

PLANNED, EVEN_PLAN = "planned", "even split, planned"
MAX_MOVES = 24  # tried at most when shares are refined
NUDGE = 1 / 32  # of a group's work, moved from the busiest device to the least busy one
Price = tuple[Prediction, dict[str, LayerCost]]
Priced = dict[str, Price]


def make_plan(
    graph: Graph,
    profile: ClusterProfile,
    *,
    mode: Mode = "train",
    memory_limit: float | Sequence[float] | None = None,
    kinds: Sequence[SplitKind] | None = None,
) -> Plan:
    """The plan of least predicted step time within each device's memory.

    ``memory_limit``: bytes, for all devices or one each, in place of the profile's.
    ``kinds``: the only kinds that may be chosen; an operator for which none of them is
    legal is replicated. Raises `PlanError` if nothing fits the memory, with the least
    that would do, and `SplitError` for a kind that is not known. The same input gives
    the same plan.
    """
    compared = _Compared(graph, profile, mode, memory_limit, kinds)
    chosen = compared.chosen
    prediction, costs = compared.priced[chosen]
    splits = compared.found[chosen]
    others = (
        compared.search.alternatives(splits)
        if not chosen.startswith(SINGLE_DEVICE)
        else {}
    )  # alone, no layer has a say
    layers = _layers(graph, profile, splits, costs, others)
    return Plan(
        profile.names,
        mode,
        graph.model,
        graph.input_shapes,
        layers,
        chosen,
        prediction,
        _alternatives({n: p for n, (p, _) in compared.priced.items()}),
        profile.estimated,
        profile.tiles,
        gathers(graph, splits, profile.world, mode),
    )


class Contender(NamedTuple):
    """A way to split the whole model that fits the memory, what it is predicted to
    take, and each layer of it.
    """

    name: str
    splits: Splits
    predicted: Prediction
    costs: Mapping[str, LayerCost]


def contenders(
    graph: Graph, profile: ClusterProfile, *, mode: Mode = "train"
) -> list[Contender]:
    """What `make_plan` chooses among: first what it chooses, then the fastest by
    prediction; none twice.
    """
    compared = _Compared(graph, profile, mode, None, None)
    order = sorted(
        compared.fitting,
        key=lambda name: (name != compared.chosen, compared.fitting[name].step_s),
    )
    found: list[Contender] = []
    for name in order:
        splits = compared.found[name]
        if all(splits != other.splits for other in found):
            found.append(Contender(name, splits, *compared.priced[name]))
    return found


class _Compared:
    """Whole-model splits, searched ones and tuned ones, what each is predicted to take,
    and the best of them.
    """

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
        for kind in allowed:
            Split("replicate") if kind == "replicate" else Split(kind, (1,))
        limits = _limits(profile, memory_limit)
        ways, pricer = (
            Candidates(graph, profile, mode, allowed),
            StepEstimator(graph, profile, mode),
        )
        self.found = ways.whole_models(limits)
        self.priced: Priced = {
            name: pricer.of(name).estimate(splits)
            for name, splits in self.found.items()
        }
        self.search = Search.within(ways, pricer, limits)
        even = Search(
            ways, pricer, ways.choices(ways.shared_proportions(even=True), own=False)
        )
        for name, one in ((PLANNED, self.search), (EVEN_PLAN, even)):
            splits = one.best(limits)
            if splits is not None:
                self.found[name], self.priced[name] = splits, pricer.estimate(splits)
        _correct(self.priced, ways, pricer)
        if not self._fitting(limits):
            least, there = (
                _gb(least_memory(self.search.tables, limits, self.search.memory)),
                _gb(limits),
            )
            raise PlanError(
                f"no split fits: the leanest needs {least} GB per device, but there are {there} GB"
            )
        self.chosen = self._choose(ways, pricer, limits)
        self.fitting = self._fitting(limits)

    def _fitting(self, limits: Limits) -> dict[str, Prediction]:
        return {name: p for name, (p, _) in self.priced.items() if _fits(p, limits)}

    def _choose(self, ways: Candidates, pricer: StepEstimator, limits: Limits) -> str:
        """What was measured to be the fastest; otherwise what is predicted to be, refined."""
        fitting, tuned = self._fitting(limits), ways.tuned_plan()
        if tuned is not None and plan_name(tuned) in fitting:
            return plan_name(tuned)
        chosen = min(
            fitting,
            key=lambda n: (
                fitting[n].step_s,
                not n.startswith(SINGLE_DEVICE),
                not n.startswith(TUNED),
            ),
        )
        if not chosen.startswith((SINGLE_DEVICE, TUNED)):
            refined, price = _refined(
                ways, pricer, self.found[chosen], self.priced[chosen], limits
            )
            if refined is not self.found[chosen]:
                chosen, self.found[PLANNED], self.priced[PLANNED] = (
                    PLANNED,
                    refined,
                    price,
                )
        return chosen


def _correct(priced: Priced, ways: Candidates, pricer: StepEstimator) -> None:
    """A tuned ratio was measured beside the computed one: what it gained is believed; a
    worse one is not kept.

    What whole steps of a tuned plan, of the device alone and of the even split beside
    it, took is not predicted any more.
    """
    for tuned in ways.tuned():
        prediction, costs = priced[tuned_name(tuned)]
        computed, _ = pricer.estimate(ways.whole(tuned.kind, tuned.computed_weights))
        gain = min(tuned.step_s / tuned.computed_step_s, 1.0)
        priced[tuned_name(tuned)] = (
            replace(prediction, step_s=computed.step_s * gain),
            costs,
        )
    if (best := ways.tuned_plan()) is not None:
        measured = {
            plan_name(best): best.step_s,
            best.alone: best.alone_s,
            best.even: best.even_s,
        }
        for way, seconds in measured.items():
            if way in priced and seconds is not None:
                prediction, costs = priced[way]
                priced[way] = replace(prediction, step_s=seconds), costs


def _refined(
    ways: Candidates,
    pricer: StepEstimator,
    splits: Splits,
    price: Price,
    limits: Limits,
) -> tuple[Splits, Price]:
    """Work is moved from the busiest device to the least busy one, as long as the step
    is predicted to be shorter.

    The search balances every operator by itself; devices go on by themselves, so what
    counts is their sum.
    """
    best, (prediction, costs) = splits, price
    for _ in range(MAX_MOVES):
        busy = prediction.busy_s
        slowest, idlest = (
            max(range(len(busy)), key=busy.__getitem__),
            min(range(len(busy)), key=busy.__getitem__),
        )
        weights: dict[Split, float] = {}
        for name, split in best.items():
            if (
                split.sizes
                and split.sizes[slowest]
                and split.sizes[idlest]
                and idlest in split.peers(slowest)
            ):
                weights[split] = weights.get(split, 0.0) + max(costs[name].forward_s)
        if not weights:
            break
        group = max(
            weights,
            key=lambda split: (weights[split], split.kind, split.sizes, split.nodes),
        )
        tried = _nudged(ways, best, group, slowest, idlest)
        after, after_costs = pricer.estimate(tried)
        if after.step_s >= prediction.step_s * (1 - 1e-4) or not _fits(after, limits):
            break
        best, prediction, costs = tried, after, after_costs
    return best, (prediction, costs)


def _nudged(
    ways: Candidates, splits: Splits, group: Split, source: int, target: int
) -> Splits:
    weights = [float(size) for size in group.sizes]
    moved = max(sum(weights[rank] for rank in group.peers(source)) * NUDGE, 1.0)
    moved = min(moved, weights[source])
    weights[source] -= moved
    weights[target] += moved

    def nudged(name: str) -> Split:
        cut = split_of(
            ways.graph.layers[name], group.kind, weights, ways.kinds, group.nodes
        )
        return with_whole_sum(cut) if group.whole else cut

    return {
        name: nudged(name) if split == group else split
        for name, split in splits.items()
    }


def _fits(prediction: Prediction, limits: Limits) -> bool:
    return all(m <= c for m, c in zip(prediction.memory_bytes, limits, strict=True))


def _layers(
    graph: Graph,
    profile: ClusterProfile,
    splits: Splits,
    costs: Mapping[str, LayerCost],
    others: Mapping[str, tuple[Alternative, ...]],
) -> dict[str, LayerPlan]:
    """What the plan says of every layer."""
    following, layers = fusible_functions(graph), {}
    for name, op in graph.layers.items():
        split, cost = splits[name], costs[name]
        chunks = (
            profile.chunks_of(op.spec, split.sizes)
            if isinstance(op, Conv) and split.kind == "filter"
            else 1
        )
        after = following.get(name, ())
        known = (
            cost.forward_s,
            cost.backward_s,
            cost.sent_bytes,
            after,
            chunks,
            others.get(name, ()),
        )
        layers[name] = LayerPlan(op, split, *known)
    return layers


def _gb(sizes: Sequence[float]) -> str:
    return ", ".join(f"{s / 1e9:.3g}" for s in sizes)


def _limits(profile: ClusterProfile, given: float | Sequence[float] | None) -> Limits:
    if given is None:
        return tuple(d.memory_bytes for d in profile.devices)
    limits = tuple(given) if isinstance(given, Sequence) else (given,) * profile.world
    if len(limits) != profile.world:
        raise PlanError(
            f"{len(limits)} memory limits were given for {profile.world} devices; give one for "
            "each, or one"
        )
    return limits


def _alternatives(priced: Mapping[str, Prediction]) -> dict[str, float]:
    """Predicted seconds of what else could be done: the best even split, a device alone
    that tells no other.
    """
    found: dict[str, float] = {}
    for name, prediction in priced.items():
        short = next((s for s in (SINGLE_DEVICE, EVEN) if name.startswith(s)), name)
        found[short] = min(prediction.step_s, found.get(short, float("inf")))
    return found
