"""The stages of the tuning job, but for that of plans: on all ranks, from the profile so far to one that knows more."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

from optuna.trial import FrozenTrial

from hetconv.candidates import Candidates
from hetconv.graph import Graph
from hetconv.parallel import parallelize
from hetconv.plan import Plan
from hetconv.planner import make_plan
from hetconv.pricing import Pricer
from hetconv.profile import ClusterProfile, TunedRatio, nodes_of
from hetconv.proportions import whole_model
from hetconv.transport import objects_of_all

from . import fit, measure
from .field import ERROR
from .fitted import device_model
from .job import Run
from .links import link_models, with_contention
from .machine import conditions
from .overlap import tune_chunks, with_overlap
from .race import Order, Seconds, step_of
from .sampling import Passes
from .shares import ROUNDS, WEIGHTS, WHY, Hopeless, TrialFailedError, Weights, refine
from .subjects import subjects_of
from .tiling import tune_tiles

OPERATORS_PART = 0.5  # of the budget
STEADY = 1.15  # times as long as usually, that a pulse may take a device which nobody needs to hear about
RATIO_PART = 0.15  # of it, from where the study of ratios begins
TRIAL_S = 1.0  # seconds that a ratio and the computed one are timed at least
PLANS_PART, CHUNKS_PART = 0.8, 1.0  # what may be spent by the end of each; the fastest plans are raced after that
TILES_PART = 0.25  # of all, where there is a GPU; the others then share the rest
Cuts = Literal["sample", "depth", "height", "width"]
CUTS: tuple[Cuts, ...] = ("depth", "height", "width", "sample")


def part_of(run: Run, part: float) -> float:
    """Of the whole budget, what this part is of what tiles leave."""
    return part * (1 - TILES_PART if run.on_gpu else 1)


def operators(run: Run) -> ClusterProfile:
    """Devices, operator by operator, each of which is kept; and links."""
    subjects, enough = subjects_of(run.graph), run.passed(part_of(run, OPERATORS_PART))
    run.say.stage("operators", len(subjects))
    samples: measure.Samples = {}
    for subject in subjects:
        known = run.known("operators", subject.key, list[dict[float, Passes]])
        if known is not None:
            samples[subject.key] = known[run.team.rank]
            run.say.advance(f"{subject.key}, known")
    left = [subject for subject in subjects if subject.key not in samples]
    for key, found in measure.operator_samples(left, run.device, enough):
        samples[key] = found
        run.keep("operators", key, objects_of_all(run.team, found))
        run.say.advance(key)
    if missing := len(subjects) - len(samples):
        run.say.line(f"{missing} smaller operators were left to the fitted roofline; --budget would allow more")
    bandwidth = measure.copy_bandwidth(run.device)
    resting = measure.resting(run.device)
    mine = device_model(run.name, run.device, samples, subjects, bandwidth, resting)
    devices, slower = zip(*objects_of_all(run.team, (mine, fit.slow_phases(samples.values()))), strict=True)
    for device, times in zip(devices, slower, strict=True):
        if times > STEADY:
            run.say.line(f"{device.name} was {times:.1f} times as slow at times; all is brought to its usual speed")
    profile = ClusterProfile(devices, link_models(run.team, run.device), nodes=nodes_of(devices))
    for pair, link in profile.links.items():
        run.say.line(f"link {pair}: {link.latency_s * 1e6:.0f} us, {1e-9 / link.s_per_byte:.2f} GB/s")
    profile = with_contention(profile, run.team, run.device)
    return with_overlap(profile, run.graph, run.job.mode, run.device, run.say)


def ratio(run: Run, profile: ClusterProfile) -> ClusterProfile:
    """The proportions of one kind of split, by whole steps."""

    def lead() -> TunedRatio | None:
        plan = make_plan(run.graph, profile, mode=run.job.mode)
        found = computed_ratio(run.graph, profile, plan)
        if found is None:
            run.say.line("no spatial or sample split is predicted to pay: no ratio to refine")
            return None
        try:
            return _Ratio(run, plan, *found).tuned()
        except TrialFailedError as e:
            run.say.line(f"no ratio is refined, for the {found[0]} split that was computed failed {e}")
            return None

    tuned = run.led(lead)
    return replace(profile, tuned=(tuned,)) if tuned is not None else profile


class _Ratio:
    """Rank 0's study of the ratio of one kind, each trial beside the computed one."""

    def __init__(self, run: Run, base: Plan, kind: Cuts, computed: Weights):
        self.run, self.base, self.kind, self.computed = run, base, kind, computed

    def tuned(self) -> TunedRatio:
        run, job = self.run, self.run.job
        assert run.store is not None  # this is rank 0
        run.say.stage(f"{self.kind} ratio", job.trials)
        study = run.store.study(f"{self.kind} ratio from {said(self.computed)}", beside="the computed ratio")
        enough = run.passed(run.spent + part_of(run, RATIO_PART))
        best, _, trials = refine(study, self.computed, self.rounds, job.trials, job.seed, enough, self.told)
        seconds = self.final(best)
        if best != self.computed and median(s["trial"] / s["computed"] for s in seconds) > 1:  # it was merely lucky
            best, seconds = self.computed, [{"computed": s["computed"], "trial": s["computed"]} for s in seconds]
        step_s, computed_s = (median(s[way] for s in seconds) for way in ("trial", "computed"))
        was = f"computed {said(self.computed)}: {computed_s * 1e3:.1f} ms"
        run.say.line(f"{self.kind} {said(best)}: {step_s * 1e3:.1f} ms a step; {was}")
        return TunedRatio(
            run.graph.digest, job.mode, self.kind, best, step_s, self.computed, computed_s, trials,
            conditions(run.device),
        )  # fmt: skip

    def rounds(self, weights: Weights, hopeless: Hopeless) -> Sequence[float]:
        """Of a trial, relative to the computed ratio's steps."""

        def enough(seconds: Seconds) -> bool:
            return hopeless(seconds["trial"] / seconds["computed"])

        order = Order(f"{self.kind} {said(weights)}", self.ways(weights), ROUNDS, least_s=TRIAL_S)
        return [s["trial"] / s["computed"] for s in self.run.race.lead(order, enough).rounds]

    def told(self, trial: FrozenTrial) -> None:
        how = f"{trial.value:.3f}x of the computed ratio's step" if trial.value is not None else "failed"
        text = f"{said(trial.user_attrs[WEIGHTS])} {how} {trial.user_attrs.get(WHY, '')}".strip()
        self.run.say.advance(text, trial.value)

    def final(self, best: Weights) -> list[Seconds]:
        """Once more, beside each other, the fastest one and the computed one, which may be the same."""
        ways = self.ways(best)
        if best == self.computed:
            ways.pop("trial")
        found = self.run.race.lead(Order(f"{self.kind} {said(best)} again", ways, ROUNDS, least_s=TRIAL_S)).rounds
        return [{"trial": s["computed"]} | s for s in found]

    def ways(self, weights: Weights) -> dict[str, Plan]:
        both = {"computed": self.computed, "trial": weights}
        whole = {name: whole_model(self.run.graph, self.kind, w, (self.kind,)) for name, w in both.items()}
        return {name: self.base.with_splits(splits) for name, splits in whole.items()}


def said(weights: Sequence[int]) -> str:
    return ":".join(map(str, weights))


def computed_ratio(graph: Graph, profile: ClusterProfile, plan: Plan) -> tuple[Cuts, Weights] | None:
    """The spatial or sample kind with the least predicted step, and its computed weights.

    None, if ``plan``, which `make_plan` gives, would be faster even if both predictions erred.
    """
    found, pricer = Candidates(graph, profile, plan.mode, CUTS).whole_models(), Pricer(graph, profile, plan.mode)
    uneven = {k: found[f"uneven {k} split"] for k in CUTS if f"uneven {k} split" in found}
    step_s = {kind: pricer.price(splits)[0].step_s for kind, splits in uneven.items()}
    kind = min(step_s, key=lambda k: step_s[k], default=None)
    best = plan.predicted
    if kind is None or best is None or step_s[kind] > (1 + ERROR) ** 2 * best.step_s:
        return None
    cut = [s for s in uneven[kind].values() if s.kind == kind]
    if not cut or sum(w > 0 for w in max(cut, key=lambda s: sum(s.sizes)).sizes) < 2:
        return None
    return kind, max(cut, key=lambda s: sum(s.sizes)).sizes


def chunks(run: Run, profile: ClusterProfile) -> ClusterProfile:
    """Of the batch, in which the plan's filter splits are gathered in inference."""
    if run.job.mode != "infer":
        return profile
    plan = make_plan(run.graph, profile, mode=run.job.mode)
    found = tune_chunks(plan, run.device, run.passed(part_of(run, CHUNKS_PART)), run.say)
    return replace(profile, chunks=tuple(replace(c, measured=conditions(run.device)) for c in found))


def tiles(run: Run, profile: ClusterProfile) -> ClusterProfile:
    """Of the plan's passes on GPUs. Last, and with the rest saved: a kernel can take the whole process with it."""
    if not run.on_gpu:
        return profile
    plan = make_plan(run.graph, profile, mode=run.job.mode)
    step = step_of(parallelize(copy.deepcopy(run.model), plan), run.x, run.job.mode)
    return replace(profile, tiles=tune_tiles(step, run.device, run.team, run.passed(1.0), run.say, run))
