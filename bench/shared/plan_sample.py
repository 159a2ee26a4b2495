"""Which plans are measured beside the tuned one: from the fastest to the slowest, evenly. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import log

from hetconv.cost.estimator import StepEstimator
from hetconv.planner.candidates import EVEN, Candidates
from hetconv.planner.partition import Splits
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE, Mode
from hetconv.sharding.split import SplitKind
from hetconv.tracing.graph import Graph

PLANS, LIKELY = 20, 3  # of them, those that are predicted to be the fastest
RATIOS = (
    (1, 2),
    (3, 2),
    (2, 1),
    (3, 1),
    (4, 1),
    (6, 1),
    (8, 1),
)  # of the first device to all others
KINDS: tuple[SplitKind, ...] = ("height", "width", "filter", "channel")


def compared(
    graph: Graph, profile: ClusterProfile, mode: Mode, plans: Mapping[str, Splits]
) -> dict[str, Splits]:
    """These, each device alone, even splits and the likeliest; of all others those that
    close the widest gaps.

    Twenty plans that take about as long as each other would say nothing of how well
    they are put in order. None twice, for by noise alone one of two would be the
    faster.
    """
    ways, pricer = Candidates(graph, profile, mode), StepEstimator(graph, profile, mode)
    found = {**plans} | {
        name: splits
        for name, splits in ways.whole_models().items()
        if "replicated" not in name
    }
    for (first, others), kind in product(RATIOS, KINDS):
        found[f"{kind} {first}:{others}"] = ways.whole(
            kind, (float(first), *(float(others),) * (profile.world - 1))
        )
    distinct: dict[str, Splits] = {}
    for name, splits in found.items():
        if name.startswith(SINGLE_DEVICE) or splits not in distinct.values():
            distinct[name] = splits
    place = {
        name: log(pricer.step_s(name, splits)) for name, splits in distinct.items()
    }
    wanted = [
        name
        for name in distinct
        if name in plans or name.startswith((SINGLE_DEVICE, EVEN))
    ]
    wanted += [
        name for name in sorted(distinct, key=place.__getitem__) if name not in wanted
    ][:LIKELY]
    rest = [name for name in distinct if name not in wanted]
    while rest and len(wanted) < PLANS:
        taken = [place[name] for name in wanted]
        wanted.append(
            max(rest, key=lambda name: min(abs(place[name] - t) for t in taken))
        )
        rest.remove(wanted[-1])
    return {name: distinct[name] for name in wanted}
