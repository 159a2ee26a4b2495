"""The tuning job, run on every rank: measure operators and links, fit a profile, refine the ratio, chunks, tiles."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from hetconv.candidates import Candidates, whole_model
from hetconv.emulate import DeviceName
from hetconv.graph import Graph
from hetconv.parallel import parallelize
from hetconv.plan import Mode, Plan
from hetconv.planner import make_plan
from hetconv.pricing import price
from hetconv.profile import Axis, ClusterProfile, DeviceModel, TunedRatio
from hetconv.recorder import capture
from hetconv.rules import Conv, Linear, SplitKind
from hetconv.transport import Team, team_of

from . import measure
from .models import build_model, channels_last, random_input
from .overlap import tune_chunks
from .progress import Reporter
from .shares import refine
from .tiling import tune_tiles

OPERATORS_PART = 0.5  # of the budget; the study of ratios has the rest
TILES_PART = 0.25  # of the budget, at the study's cost, where there is a GPU
ROUNDS, FINAL_ROUNDS = 3, 7
Cuts = Literal["sample", "depth", "height", "width"]
CUTS: tuple[Cuts, ...] = ("depth", "height", "width", "sample")


@dataclass(frozen=True)
class Job:
    """What `hetconv autotune` was asked for. ``budget`` in seconds."""

    devices: tuple[DeviceName, ...]
    model: str
    model_args: str
    input: tuple[int, ...]
    mode: Mode
    trials: int
    budget: float
    output: Path
    seed: int


def tune(job: Job) -> ClusterProfile:
    """Collective. Writes the profile on rank 0 and returns it on every rank."""
    start = time.monotonic()
    team = team_of()
    name = job.devices[team.rank]
    device = torch.device(name.device)
    model = build_model(job.model, job.model_args, job.seed).to(device).train(job.mode == "train")
    model, x = channels_last(model, random_input(job.input, job.seed).to(device))
    with torch.set_grad_enabled(job.mode == "train"):
        graph = capture(model, x)
    with Reporter("autotune") as say:
        named = ", ".join(f"{d}{' (emulated)' * d.emulated}" for d in job.devices)
        say.line(f"{graph.model}, {job.mode}, on {named}")
        profile = _measured(job, graph, team, device, name, lambda: time.monotonic() - start, say)
        on_gpu = any(d.kind == "cuda" for d in profile.devices)
        last = start + job.budget * (1 - TILES_PART if on_gpu else 1)
        tuned = _tuned(job, model, x, graph, profile, lambda: time.monotonic() > last, say)
        profile = replace(profile, tuned=(tuned,) if tuned is not None else ())
        plan = make_plan(graph, profile, mode=job.mode)
        if job.mode == "infer":
            profile = replace(profile, chunks=tune_chunks(plan, device, lambda: time.monotonic() > last, say))
        if team.rank == 0:
            profile.save(job.output)
        if on_gpu:  # last, and with the rest saved: a kernel can take the whole process with it
            split = parallelize(copy.deepcopy(model), plan)
            step = step_of(split, x, job.mode)
            tiles = tune_tiles(step, device, team, lambda: time.monotonic() - start > job.budget, say)
            profile = replace(profile, tiles=tiles)
            if team.rank == 0:
                profile.save(job.output)
        say.line(f"wrote {job.output} after {time.monotonic() - start:.0f} s")
    return profile


def _measured(
    job: Job,
    graph: Graph,
    team: Team,
    device: torch.device,
    name: DeviceName,
    elapsed: Callable[[], float],
    say: Reporter,
) -> ClusterProfile:
    axes: tuple[Axis, ...] = ("pixels", "filters")
    ops: list[tuple[Conv | Linear, Axis]] = [
        (op, axis)
        for op in sorted(set(graph.layers.values()), key=measure.work, reverse=True)
        for axis in (axes if isinstance(op, Linear) or op.spec.groups < op.spec.K else axes[:1])
    ]
    say.stage("operators", len(ops))
    samples: measure.Samples = {}
    for key, found in measure.operator_samples(ops, device, lambda: elapsed() > job.budget * OPERATORS_PART):
        samples[key] = found
        say.advance(key)
    if len(samples) < len(ops):
        say.line(
            f"{len(ops) - len(samples)} smaller operators were left to the fitted roofline; --budget would allow more"
        )
    mine = measure.device_model(name, device, samples, ops, measure.copy_bandwidth(device))
    devices: list[DeviceModel] = [mine] * team.size
    dist.all_gather_object(devices, mine, group=team.control)
    prints: list[Any] = [None] * team.size
    dist.all_gather_object(prints, measure.fingerprint(device), group=team.control)
    links = measure.link_models(team, device)
    for pair, link in links.items():
        say.line(f"link {pair}: {link.latency_s * 1e6:.0f} us, {1e-9 / link.s_per_byte:.2f} GB/s")
    return ClusterProfile(tuple(devices), links, fingerprint={f"rank {r}": p for r, p in enumerate(prints)})


def step_of(model: nn.Module, x: Tensor, mode: Mode) -> Callable[[], None]:
    """One inference, or one forward and backward with the mean square of the outputs as loss."""

    def infer() -> None:
        with torch.no_grad():
            model(x)

    def train() -> None:
        model.zero_grad()
        outputs = [y for y in tree_iter(model(x)) if isinstance(y, Tensor) and y.is_floating_point()]
        sum(y.square().mean() for y in outputs).backward()  # type: ignore[union-attr]

    return train if mode == "train" else infer


def _tuned(
    job: Job,
    model: nn.Module,
    x: Tensor,
    graph: Graph,
    profile: ClusterProfile,
    enough: Callable[[], bool],
    say: Reporter,
) -> TunedRatio | None:
    """The study; rank 0 decides what to try, all ranks measure it."""
    found = _start(graph, profile, job.mode)
    if found is None:
        say.line("no spatial or sample split is predicted to pay: no ratio to refine")
        return None
    kind, computed = found
    contest = _Contest(model, x, graph, make_plan(graph, profile, mode=job.mode), kind, computed, job.mode)
    say.stage(f"{kind} ratio", job.trials)

    def relative(weights: tuple[int, ...]) -> float:
        ratio = contest.lead(weights, ROUNDS)
        say.advance(f"{':'.join(map(str, weights))} {ratio:.3f}x of the computed ratio's step")
        return ratio

    trials = 0
    if contest.team.rank == 0:
        best, _, trials = refine(computed, relative, job.trials, job.seed, enough)
        if best == computed or contest.lead(best, FINAL_ROUNDS) > 1:  # or a trial that was merely lucky
            contest.lead(computed, ROUNDS)
        contest.end()
    else:
        contest.follow()
    was = f"computed {':'.join(map(str, computed))}: {contest.computed_s * 1e3:.1f} ms"
    say.line(f"{kind} {':'.join(map(str, contest.weights))}: {contest.trial_s * 1e3:.1f} ms a step; {was}")
    return TunedRatio(
        graph.digest, job.mode, kind, contest.weights, contest.trial_s, computed, contest.computed_s, trials
    )


class _Contest:
    """Whole steps of one ratio against the computed one, side by side. Rank 0 leads, the others follow."""

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        graph: Graph,
        plan: Plan,
        kind: SplitKind,
        computed: tuple[int, ...],
        mode: Mode,
    ):
        self.team = team_of()
        self._model, self._x, self._graph, self._plan, self._kind, self._mode = model, x, graph, plan, kind, mode
        self._computed = self._step(computed)
        self.weights, self.trial_s, self.computed_s = computed, 0.0, 0.0

    def _step(self, weights: tuple[int, ...]) -> Callable[[], None]:
        splits = whole_model(self._graph, self._kind, weights, (self._kind,))
        return step_of(parallelize(copy.deepcopy(self._model), self._plan.with_splits(splits)), self._x, self._mode)

    def _play(self, weights: tuple[int, ...], rounds: int) -> float:
        steps = {"computed": self._computed, "trial": self._step(weights)}
        times = measure.paired(steps, rounds, self._x.device)
        self.weights = weights
        self.trial_s, self.computed_s = median(times["trial"]), median(times["computed"])
        return median(t / c for t, c in zip(times["trial"], times["computed"], strict=True))

    def lead(self, weights: tuple[int, ...], rounds: int) -> float:
        """Seconds relative to the computed ratio's; what was played last is remembered."""
        measure.told((weights, rounds))
        return self._play(weights, rounds)

    def end(self) -> None:
        measure.told(None)

    def follow(self) -> None:
        while (order := measure.told(None)) is not None:
            self._play(*order)


def _start(graph: Graph, profile: ClusterProfile, mode: Mode) -> tuple[Cuts, tuple[int, ...]] | None:
    """The spatial or sample kind with the least predicted step, and its computed weights."""
    found = Candidates(graph, profile, mode, CUTS).whole_models()
    uneven = {k: found[f"uneven {k} split"] for k in CUTS if f"uneven {k} split" in found}
    if not uneven:
        return None
    kind = min(uneven, key=lambda k: price(graph, profile, uneven[k], mode)[0].step_s)
    cut = [s for s in uneven[kind].values() if s.kind == kind]
    if not cut or sum(w > 0 for w in max(cut, key=lambda s: sum(s.sizes)).sizes) < 2:
        return None
    return kind, max(cut, key=lambda s: sum(s.sizes)).sizes
