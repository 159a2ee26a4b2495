"""The stages of the tuning job, but for that of plans: on all ranks, from the profile
so far to one that knows more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from statistics import median

import torch

from hetconv.autotune.measure import fit, timer
from hetconv.autotune.measure.device_info import conditions
from hetconv.autotune.measure.fit import device_model
from hetconv.autotune.measure.layer_workloads import Layer, Subject, subjects_of
from hetconv.autotune.measure.links import link_models, with_contention
from hetconv.autotune.measure.overlap import tune_chunks, with_overlap
from hetconv.autotune.measure.sampling import Passes, doubts
from hetconv.comm.rank_group import all_gather_object
from hetconv.nn.parallelize import parallelize
from hetconv.planner.make_plan import make_plan
from hetconv.schemas.cluster_profile import ClusterProfile, nodes_of

from .job import Run
from .race import step_of
from .tile_stage import tune_tiles

OPERATORS_PART = 0.5  # of the budget
AGAIN = 4  # times at most that an operator is visited again
# times as long as usually, that a pulse may take a device which nobody needs to hear
# about
STEADY = 1.15
PLANS_PART, CHUNKS_PART = (
    0.75,
    1.0,
)  # what may be spent by the end of each; the fastest plans are raced after that
TILES_PART = 0.25  # of all, where there is a GPU; the others then share the rest


def part_of(run: Run, part: float) -> float:
    """Of the whole budget, what this part is of what tiles leave."""
    return part * (1 - TILES_PART if run.on_gpu else 1)


def operators(run: Run) -> ClusterProfile:
    """Devices, operator by operator, each of which is kept; and links."""
    subjects, enough = (
        subjects_of(run.graph, run.group.size),
        run.passed(part_of(run, OPERATORS_PART)),
    )
    run.say.stage("operators", len(subjects))
    samples: timer.Samples = {}
    for subject in subjects:
        known = run.known("operators", subject.key, list[dict[float, Passes]])
        if known is not None:
            samples[subject.key] = known[run.group.rank]
            run.say.advance(f"{subject.key}, known")
    left = [subject for subject in subjects if subject.key not in samples]
    resting = [
        timer.resting(run.device)
    ]  # some seconds apart: what disturbed one is gone
    for key, found in timer.operator_samples(
        left, run.device, enough, run.job.mode == "train"
    ):
        samples[key] = found
        run.keep("operators", key, all_gather_object(run.group, found))
        run.say.advance(key)
    resting.append(timer.resting(run.device))
    visited = [subject for subject in subjects if subject.key in samples]
    look_within(run, visited, samples, enough)
    settle(run, visited, samples, enough)
    if missing := len(subjects) - len(samples):
        run.say.line(
            f"{missing} smaller operators were left to the fitted roofline; --budget would "
            "allow more"
        )
    bandwidth = timer.copy_bandwidth(run.device)
    resting.append(timer.resting(run.device))
    mine = device_model(
        run.name, run.device, samples, subjects, bandwidth, median(resting)
    )
    devices, slower = zip(
        *all_gather_object(run.group, (mine, fit.slow_phases(samples.values()))),
        strict=True,
    )
    for device, times in zip(devices, slower, strict=True):
        if times > STEADY:
            run.say.line(
                f"{device.name} was {times:.1f} times as slow at times; all is brought to its "
                "usual speed"
            )
    profile = ClusterProfile(
        devices, link_models(run.group, run.device), nodes=nodes_of(devices)
    )
    for pair, link in profile.links.items():
        run.say.line(
            f"link {pair}: {link.latency_s * 1e6:.0f} us, {1e-9 / link.s_per_byte:.2f} GB/s"
        )
    profile = with_contention(profile, run.group, run.device)
    return with_overlap(profile, run.graph, run.job.mode, run.device, run.say)


def look_within(
    run: Run,
    subjects: Sequence[Subject],
    samples: timer.Samples,
    enough: Callable[[], bool],
) -> None:
    """Adds to ``samples`` where whole grains of layers' filters and channels begin and
    end, until it is ``enough``.

    Only now that all layers have been seen: this takes longer than whole grains, which
    tell most of it.
    """
    layers = [subject for subject in subjects if isinstance(subject, Layer)]
    mine = [_ends_within(layer, samples[layer.key], run.device) for layer in layers]
    wanted = [
        any(of_ranks)
        for of_ranks in zip(*all_gather_object(run.group, mine), strict=True)
    ]
    run.say.stage("operators within", sum(wanted))
    for subject, new in compress(zip(layers, mine, strict=True), wanted):
        if timer.told(enough()):
            return
        _visit_again(run, subject, samples, new)


def _ends_within(
    layer: Layer, known: Mapping[float, Passes], device: torch.device
) -> list[float]:
    """Shares that are not ``known``; none of a layer for which the memory did not suffice."""
    steps = layer.steps(device) if known else None
    ends = [part / layer.extent for part in steps.ends] if steps is not None else []
    return [share for share in ends if share not in known]


def settle(
    run: Run,
    subjects: Sequence[Subject],
    samples: timer.Samples,
    enough: Callable[[], bool],
) -> None:
    """Adds to ``samples``, each of which is kept, until all have settled or it is
    ``enough``: on rank 0.

    `AGAIN` times at most of those that are in doubt, first those by which a step may be most off.
    """
    training = run.job.mode == "train"
    for _ in range(AGAIN):
        mine = [
            s.count * max(doubts(samples[s.key], training).values(), default=0.0)
            for s in subjects
        ]
        off_s = [
            max(of_ranks)
            for of_ranks in zip(*all_gather_object(run.group, mine), strict=True)
        ]
        order = sorted(range(len(subjects)), key=lambda i: -off_s[i])
        doubtful = [subjects[i] for i in order if off_s[i] > 0]
        if not doubtful or timer.told(enough()):
            return
        run.say.stage("operators again", len(doubtful))
        for subject in doubtful:
            _visit_again(run, subject, samples)
            if timer.told(enough()):
                return


def _visit_again(
    run: Run, subject: Subject, samples: timer.Samples, new: Sequence[float] = ()
) -> None:
    """Adds to ``samples`` what `more_samples` finds, which is kept."""
    training = run.job.mode == "train"
    samples[subject.key] = timer.more_samples(
        subject, samples[subject.key], run.device, training, new
    )
    run.keep(
        "operators", subject.key, all_gather_object(run.group, samples[subject.key])
    )
    run.say.advance(subject.key)


def chunks(run: Run, profile: ClusterProfile) -> ClusterProfile:
    """Of the batch, in which the plan's filter splits are gathered in inference."""
    if run.job.mode != "infer":
        return profile
    plan = make_plan(run.graph, profile, mode=run.job.mode)
    found = tune_chunks(
        plan, run.device, run.passed(part_of(run, CHUNKS_PART)), run.say
    )
    return replace(
        profile,
        chunks=tuple(replace(c, measured=conditions(run.device)) for c in found),
    )


def tiles(run: Run, profile: ClusterProfile) -> ClusterProfile:
    """Of the plan's passes on GPUs. Last, and with the rest saved: a kernel can take
    the whole process with it.
    """
    if not run.on_gpu:
        return profile
    plan = make_plan(run.graph, profile, mode=run.job.mode)
    step = step_of(
        parallelize(copy.deepcopy(run.model), plan), run.inputs, run.job.mode
    )
    return replace(
        profile,
        tiles=tune_tiles(step, run.device, run.group, run.passed(1.0), run.say, run),
    )
