"""The tuning job, run on every rank: measure operators and links, fit a profile, refine the ratio on whole steps."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from hetconv.cost import price
from hetconv.emulate import DeviceName
from hetconv.errors import HetConvError
from hetconv.graph import Graph
from hetconv.modules import parallelize
from hetconv.plan import Mode
from hetconv.planner import candidates, make_plan, whole_model
from hetconv.profile import Axis, ClusterProfile, DeviceModel, TunedRatio
from hetconv.recorder import capture
from hetconv.rules import SPATIAL, Conv, Linear, Split
from hetconv.transport import Team, team_of

from . import measure
from .models import build_model, random_input
from .progress import Reporter
from .shares import refine

OPERATORS_PART = 0.5  # of the budget; the study has the rest
ROUNDS, FINAL_ROUNDS = 3, 7


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
    x = random_input(job.input, job.seed).to(device)
    if len(job.input) == 4:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    with torch.set_grad_enabled(job.mode == "train"):
        graph = capture(model, x)
    with Reporter("autotune") as say:
        emulated = ", ".join(str(d) for d in job.devices if d.emulated)
        say.line(f"{graph.model}, {job.mode}, on {', '.join(map(str, job.devices))}{' (emulated: ' + emulated + ')' * bool(emulated)}")
        profile = _measured(job, graph, team, device, name, lambda: time.monotonic() - start, say)
        tuned = _tuned(job, model, x, graph, profile, team, lambda: time.monotonic() - start > job.budget, say)
        profile = replace(profile, tuned=(tuned,) if tuned is not None else ())
        if team.rank == 0:
            profile.save(job.output)
        say.line(f"wrote {job.output} after {time.monotonic() - start:.0f} s")
    return profile


def _measured(
    job: Job, graph: Graph, team: Team, device: torch.device, name: DeviceName, elapsed: Callable[[], float], say: Reporter
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
        say.line(f"{len(ops) - len(samples)} smaller operators were left to the fitted roofline; --budget would allow more")
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
    job: Job, model: nn.Module, x: Tensor, graph: Graph, profile: ClusterProfile, team: Team,
    enough: Callable[[], bool], say: Reporter,
) -> TunedRatio | None:  # fmt: skip
    """The study; rank 0 decides, the others measure what it names."""
    found = _start(graph, profile, job.mode)
    if found is None:
        say.line("no spatial or sample split is predicted to pay: no ratio to refine")
        return None
    kind, weights = found
    plan = make_plan(graph, profile, mode=job.mode)

    def split_model(w: tuple[int, ...]) -> nn.Module:
        splits = {n: Split("replicate") for n in plan.layers} | whole_model(graph, kind, w, (kind,))
        return parallelize(copy.deepcopy(model), plan.with_splits(splits))

    computed = step_of(split_model(weights), x, job.mode)

    def compare(w: tuple[int, ...], rounds: int) -> Mapping[str, list[float]]:
        return measure.paired({"computed": computed, "trial": step_of(split_model(w), x, job.mode)}, rounds, x.device)

    say.stage(f"{kind} ratio", job.trials)
    if team.rank != 0:
        while (order := _told(team, None)) is not None:
            times = compare(*order)
        best, ran = _told(team, None)
    else:

        def relative(w: tuple[int, ...], rounds: int = ROUNDS) -> float:
            nonlocal times
            _told(team, (w, rounds))
            times = compare(w, rounds)
            ratio = median(t / c for t, c in zip(times["trial"], times["computed"], strict=True))
            say.advance(f"{':'.join(map(str, w))} {ratio:.3f}x of the computed ratio's step")
            return ratio

        best, gain, ran = refine(weights, relative, job.trials, job.seed, enough)
        if relative(best, FINAL_ROUNDS) > 1 and best != weights:  # a lucky trial: the computed ratio stands
            best = weights
            relative(best, FINAL_ROUNDS)
        _told(team, None)
        _told(team, (best, ran))
    step, first = median(times["trial"]), median(times["computed"])
    say.line(f"{kind} {':'.join(map(str, best))}: {step * 1e3:.1f} ms a step; computed {':'.join(map(str, weights))}: {first * 1e3:.1f} ms")
    return TunedRatio(graph.digest, job.mode, kind, best, step, weights, first, ran)


def _told(team: Team, word: Any) -> Any:
    """Rank 0's word on every rank."""
    words = [word]
    dist.broadcast_object_list(words, group=team.control, group_src=0)
    return words[0]


def _start(graph: Graph, profile: ClusterProfile, mode: Mode) -> tuple[Any, tuple[int, ...]] | None:
    """The spatial or sample kind with the least predicted step, and its computed weights."""
    found = candidates(graph, profile, mode, tuple(SPATIAL))
    uneven = {k: found[f"uneven {k} split"] for k in SPATIAL if f"uneven {k} split" in found}
    if not uneven:
        raise HetConvError("the model has nothing to split by height, width or sample")
    kind = min(uneven, key=lambda k: price(graph, profile, uneven[k], mode)[0].step_s)
    cut = [s for s in uneven[kind].values() if s.kind == kind]
    if not cut or sum(w > 0 for w in max(cut, key=lambda s: sum(s.sizes)).sizes) < 2:
        return None
    return kind, max(cut, key=lambda s: sum(s.sizes)).sizes
