"""Steps of a tuned model, measured and predicted: the plan, an even split, and one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hetconv.autotune.measure.layer_workloads import forward_flops
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.candidates import EVEN, Candidates
from hetconv.planner.partition import Splits
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE, Mode
from hetconv.schemas.tuning_results import TunedPlan, TunedRatio
from hetconv.sharding.conv_spec import MemoryFormat
from hetconv.tracing.graph import Graph

from .profile_text import disturbance
from .text import milliseconds

RATIO = "kind", "weights", "step_s", "computed_weights", "computed_step_s"
MAX_OFF = 0.3  # of a prediction that plans can be chosen by
UNKNOWN = None, None  # a name, and its seconds
TUNED_LABEL = "tuned"
WAY_HEADS = "", "what", "measured ms", "predicted ms", "off by", "tuned is faster"


@dataclass(frozen=True)
class Way:
    """A way to run the model: seconds of its steps as measured, if they were, and as predicted."""

    name: str
    measured_s: float | None = None
    predicted_s: float | None = None

    def faster_than(self, other: Way) -> float | None:
        """How many times, as measured."""
        if self.measured_s is None or other.measured_s is None:
            return None
        return other.measured_s / self.measured_s

    @property
    def off(self) -> float | None:
        """By which part of what was measured the prediction was wrong."""
        if self.measured_s is None or self.predicted_s is None:
            return None
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Summary:
    """Result for a model and mode.

    Attributes:
        model: name of the model.
        mode: whether the steps train.
        devices: names of the devices.
        tuned: the tuned plan, if one was measured.
        even: the even split.
        alone: the fastest single device.
        layers: number of layers of each kind; empty where one device is the fastest.
        shares: part of the operations of split layers that each device has.
        ratio: the tuned ratio, if one was searched.
        trials: number of plans that were measured.
        warnings: why times or plans may be wrong.
        memory_format: in which the model was measured.
    """

    model: str
    mode: Mode
    devices: tuple[str, ...]
    tuned: Way | None
    even: Way | None
    alone: Way | None
    layers: Mapping[str, int]
    shares: tuple[float, ...]
    ratio: TunedRatio | None
    trials: int | None
    warnings: tuple[str, ...] = ()
    memory_format: MemoryFormat = "channels_last"

    @property
    def ways(self) -> tuple[tuple[str, Way], ...]:
        """What is compared, by label."""
        known = (TUNED_LABEL, self.tuned), ("even", self.even), ("alone", self.alone)
        return tuple((label, way) for label, way in known if way is not None)

    def to_json(self) -> dict[str, Any]:
        """What was not measured is None."""
        ways = {"tuned": self.tuned, "even": self.even, "alone": self.alone}
        return {
            "model": self.model,
            "mode": self.mode,
            "devices": self.devices,
            "memory_format": self.memory_format,
            **{
                name: asdict(way) if way is not None else None
                for name, way in ways.items()
            },
            "speedup": {
                f"over_{name}": _faster(self.tuned, way)
                for name, way in ways.items()
                if name != "tuned"
            },
            "warnings": self.warnings,
            "layers": self.layers,
            "shares": self.shares,
            "ratio": {name: getattr(self.ratio, name) for name in RATIO}
            if self.ratio is not None
            else None,
            "trials": {
                "ratio": self.ratio.trials if self.ratio is not None else None,
                "plans": self.trials,
            },
        }


def _faster(way: Way | None, than: Way | None) -> float | None:
    return way.faster_than(than) if way is not None and than is not None else None


def way_cells(ways: Sequence[tuple[str, Way]]) -> Iterator[tuple[str, ...]]:
    """Yields what `WAY_HEADS` names, for each labelled way."""
    tuned = dict(ways).get(TUNED_LABEL)
    for label, way in ways:
        seconds = (milliseconds(t) for t in (way.measured_s, way.predicted_s))
        off = f"{way.off:+.0%}" if way.off is not None else "-"
        gain = _faster(tuned, way) if way is not tuned else None
        faster = f"{gain:.2f}x" if gain is not None else ""
        yield label, way.name, *seconds, off, faster


def summarize(graph: Graph, profile: ClusterProfile, mode: Mode) -> Summary:
    """Summarizes a profile.

    Where no plan was measured, the even split and the device are those that are predicted
    to be the fastest.
    """
    ways = Candidates(graph, profile, mode)
    best, ratio = ways.tuned_plan(), next(iter(ways.tuned()), None)
    predicted, splits = (
        _predictions(graph, profile, mode),
        dict(best.splits) if best is not None else {},
    )
    even, alone = (
        ((best.even, best.even_s), (best.alone, best.alone_s))
        if best is not None
        else (UNKNOWN, UNKNOWN)
    )
    tuned = Way(best.name, best.step_s, best.predicted_s) if best is not None else None
    return Summary(
        graph.model,
        mode,
        tuple(d.name + " (emulated)" * d.emulated for d in profile.devices),
        tuned,
        _way(EVEN, *even, predicted) if profile.world > 1 else None,
        _way(SINGLE_DEVICE, *alone, predicted),
        _layers(best) if best is not None else {},
        _shares(graph, splits, profile.world),
        ratio,
        best.trials if best is not None else None,
        tuple(_warnings(profile, tuned)),
        profile.memory_format,
    )


def _warnings(profile: ClusterProfile, tuned: Way | None) -> Iterator[str]:
    if (warning := disturbance(profile)) is not None:
        yield warning
    if tuned is not None and tuned.off is not None and abs(tuned.off) > MAX_OFF:
        yield (
            f"the prediction for the plan is off by {tuned.off:+.0%}, so that a faster one "
            "may have been missed: run hetconv autotune again, with a larger --budget and "
            "while nothing else uses the devices"
        )


def _layers(best: TunedPlan) -> dict[str, int]:
    alone = best.name.startswith(
        SINGLE_DEVICE
    )  # which is written as a cut into one part and nothing
    return {} if alone else dict(Counter(split.kind for split in best.splits.values()))


def _predictions(graph: Graph, profile: ClusterProfile, mode: Mode) -> dict[str, float]:
    """Of even splits and devices alone."""
    pricer, ways = (
        StepEstimator(graph, profile, mode),
        Candidates(graph, profile, mode).whole_models(),
    )
    wanted = {
        name: splits
        for name, splits in ways.items()
        if name.startswith((EVEN, SINGLE_DEVICE))
    }
    return {name: pricer.step_s(name, splits) for name, splits in wanted.items()}


def _way(
    sort: str,
    name: str | None,
    measured_s: float | None,
    predicted: Mapping[str, float],
) -> Way | None:
    """The one that was measured, or the first by prediction."""
    if name is not None:
        return Way(name, measured_s, predicted.get(name))
    own = {n: s for n, s in predicted.items() if n.startswith(sort)}
    first = min(own, key=own.__getitem__, default=None)
    return Way(first, None, own[first]) if first is not None else None


def _shares(graph: Graph, splits: Splits, world: int) -> tuple[float, ...]:
    """Empty where nothing is cut."""
    done = [0.0] * world
    for name, split in splits.items():
        if split.kind != "replicate":
            done = [
                d + forward_flops(graph.layers[name]) * share
                for d, share in zip(done, split.shares, strict=True)
            ]
    return tuple(d / sum(done) for d in done) if sum(done) else ()
