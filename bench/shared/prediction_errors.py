"""What a profile predicts of layers and of whole steps, beside what they take."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import kendalltau
from torch import nn

from hetconv.autotune.measure import fit
from hetconv.autotune.measure.layer_workloads import LayerWorkload, workloads_of
from hetconv.autotune.measure.paired_rounds import Round, Step
from hetconv.autotune.measure.sampling import Passes, TimePasses
from hetconv.autotune.measure.timer import time_again, time_workloads, timed
from hetconv.autotune.models.inputs import ModelInputs
from hetconv.autotune.search.race import device_of, plain_step, plain_variants, step_of
from hetconv.comm.rank_group import all_gather_object, rank_group_of
from hetconv.cost.estimator import StepEstimator
from hetconv.cost.operator_cost import layer_curve
from hetconv.nn.parallelize import parallelize
from hetconv.planner.make_plan import make_plan
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import DeviceModel
from hetconv.schemas.plan import SINGLE_DEVICE, Mode
from hetconv.sharding.split import Split
from hetconv.tracing.graph import Graph

MAX_LAYERS = 16  # of which errors are asked for, along one axis each
SHARES = 0.3, 0.7
VISITS = 3  # of each, some seconds apart
FORMAT_TRIALS = 3  # of the plain model in each memory format
Plans = Mapping[str, Mapping[str, Split]]


@dataclass(frozen=True)
class Check:
    """Seconds of a step by plan: (predicted, measured). ``rounds``: of which what was
    measured is the median.
    """

    steps: Mapping[str, tuple[float, float]]
    rounds: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def errors(self) -> list[float]:
        """Of the predictions, as parts of what was measured, in rising order."""
        return sorted(
            abs(predicted - measured) / measured
            for predicted, measured in self.steps.values()
        )

    @property
    def figures(self) -> dict[str, float]:
        """Median and 90 % quantile of the errors, and Kendall's tau of the two orders,
        1 if they are the same.

        What noise alone makes of it: ``spread of rounds``, the median deviation of a
        plan's rounds from their median, and ``tau of rounds``, of the order in half of
        the rounds and in the others.
        """
        found = {
            "median error": median(self.errors),
            "p90 error": float(np.quantile(self.errors, 0.9)),
        }
        found["tau"] = _tau(self.steps.values())
        if self.rounds:
            middles = {name: median(seconds) for name, seconds in self.rounds.items()}
            found["spread of rounds"] = median(
                abs(s / middles[name] - 1)
                for name, seconds in self.rounds.items()
                for s in seconds
            )
            if all(len(seconds) > 1 for seconds in self.rounds.values()):
                found["tau of rounds"] = _tau(
                    [(median(s[::2]), median(s[1::2])) for s in self.rounds.values()]
                )
        return found


def _tau(pairs: Iterable[tuple[float, float]]) -> float:
    """Kendall's, of two orders."""
    return float(kendalltau(*zip(*pairs, strict=True)).statistic)


@dataclass(frozen=True)
class Spot(LayerWorkload):
    """A layer at one share, measured as the tuner measures it."""

    part: int = 1

    @property
    def key(self) -> str:
        return f"{super().key} {self.part}"

    @property
    def share(self) -> float:
        return self.part / self.extent

    def samples(
        self,
        time_passes: TimePasses,
        device: torch.device,
        shares: Collection[float] = (),
    ) -> dict[float, Passes]:
        return {self.share: time_passes(self.calls(self.part, device))}


class LayerErrors(NamedTuple):
    """In rising order, as parts of what was measured: of what was ``predicted``, and of
    what was ``repeated``, the same measurement again.
    """

    predicted: list[float]
    repeated: list[float]


def layer_errors(
    graph: Graph, profile: ClusterProfile, mode: Mode, device: torch.device
) -> LayerErrors:
    """Of the layers with the most work at some shares at which plans can cut, along
    every axis, on every rank.

    Collective. They are measured anew, most at shares that the profile has no point
    for; and all once more after it.
    """
    own, group = profile.devices[rank_group_of().rank], rank_group_of()
    layers = [
        w
        for w in workloads_of(graph, group.size, profile.memory_format)
        if isinstance(w, LayerWorkload)
    ][:MAX_LAYERS]
    shares = [
        (s, max(round(share * s.extent / s.cut), 1) * s.cut)
        for s in layers
        for share in SHARES
    ]
    spots = [
        Spot(
            s.op,
            s.axis,
            s.dtype,
            s.bias,
            s.between,
            memory_format=s.memory_format,
            part=part,
        )
        for s, part in dict.fromkeys(shares)
    ]
    first, again = (
        _spot_seconds(spots, device, own, mode == "train") for _ in range(2)
    )
    predicted, repeated = [], []
    for spot, k in product(spots, range(1 + (mode == "train"))):
        if spot.key in first and spot.key in again:
            curve = layer_curve(own, spot.op, spot.axis, bool(k), spot.dtype)
            measured = first[spot.key][k]
            predicted.append(abs(curve.at(spot.share) / measured - 1))
            repeated.append(abs(again[spot.key][k] / measured - 1))
    of_ranks = zip(*all_gather_object(group, (predicted, repeated)), strict=True)
    return LayerErrors(*(sorted(chain(*each)) for each in of_ranks))


def _spot_seconds(
    spots: Sequence[Spot], device: torch.device, own: DeviceModel, backward: bool
) -> dict[str, tuple[float, float]]:
    """Collective: by key, of both passes as calls by the host; without those for which
    there is no memory.
    """
    by_key, found = {spot.key: spot for spot in spots}, {}
    host_s = own.overhead(False), own.overhead(True)
    visited = dict(time_workloads([*by_key.values()], device, lambda: False))
    for _ in range(1, VISITS):
        visited = {
            key: time_again(by_key[key], samples, device, backward)
            for key, samples in visited.items()
        }
    for key, samples in visited.items():
        if samples:
            measured, share = fit.operator_model(samples), by_key[key].share
            called = fit.with_dispatch(measured, host_s, device.type == "cuda")
            found[key] = called.forward.at(share), called.backward.at(share)
    return found


def plan_steps(
    model: nn.Module,
    inputs: ModelInputs,
    graph: Graph,
    profile: ClusterProfile,
    mode: Mode,
    plans: Plans,
) -> dict[str, Step]:
    """Collective: steps of copies of a plain ``model`` under these splits.

    The splits of a device alone, by the name that `Candidates` gives them, run as the
    plain model on that rank, in its faster memory format.
    """
    plan, pricer = (
        make_plan(graph, profile, mode=mode),
        StepEstimator(graph, profile, mode),
    )
    steps: dict[str, Step] = {}
    for name, splits in plans.items():
        if name.startswith(SINGLE_DEVICE):
            compute_s = pricer.of(name).estimate(splits)[0].compute_s
            works = rank_group_of().rank == compute_s.index(max(compute_s))
            steps[name] = _fastest_alone(model, inputs, mode) if works else lambda: None
        else:
            steps[name] = step_of(
                parallelize(copy.deepcopy(model), plan.with_splits(splits)),
                inputs,
                mode,
            )
    return steps


def _fastest_alone(model: nn.Module, inputs: ModelInputs, mode: Mode) -> Step:
    """On this rank, in the memory format in which a step takes less time."""
    steps = [
        plain_step(variant, model, inputs, mode)
        for variant in plain_variants(rank_group_of().rank, inputs)
    ]
    took = [
        [timed(step, device_of(model)) for step in steps]
        for _ in range(1 + FORMAT_TRIALS)
    ][1:]
    return min(
        zip(zip(*took, strict=True), steps, strict=True),
        key=lambda known: min(known[0]),
    )[1]


def predicted_and_measured(
    ran: Sequence[Round],
    graph: Graph,
    profile: ClusterProfile,
    mode: Mode,
    plans: Plans,
) -> Check:
    """Of `plan_steps` that ``ran`` in turn, as `paired_rounds`, what they took beside
    what is predicted. Pure.
    """
    pricer = StepEstimator(graph, profile, mode)
    predicted = {name: pricer.step_s(name, splits) for name, splits in plans.items()}
    times = {name: [one[name] for one in ran] for name in plans}
    return Check(
        {name: (predicted[name], median(times[name])) for name in plans}, times
    )
