"""The stages of the tuning job, but for that of plans.

Each runs on all ranks, from the profile so far to one that knows more.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from hetconv.autotune.measure import pace, timer
from hetconv.autotune.measure.fit import device_model
from hetconv.autotune.measure.layer_workloads import workloads_of
from hetconv.autotune.measure.links import link_models, with_contention
from hetconv.autotune.measure.overlap import tune_chunks, with_overlap
from hetconv.autotune.measure.pace import PaceChecks
from hetconv.comm.rank_group import all_gather_object
from hetconv.nn.parallelize import parallelize
from hetconv.planner.make_plan import make_plan
from hetconv.schemas.cluster_profile import ClusterProfile, nodes_of
from hetconv.schemas.device_model import DeviceModel

from .job import Run, part_of
from .operator_samples import OperatorSamples
from .race import step_of
from .tile_stage import tune_tiles

# Of the budget, what may be spent by the end of each stage; the finalists race after
# that of plans.
PLANS_PART, CHUNKS_PART = 0.75, 1.0
LINKS_PART = 0.1  # for the links alone, and again for all at once


def operators(run: Run) -> ClusterProfile:
    """Measures devices, operator by operator, and links. Collective.

    Args:
        run: the job, which keeps each operator.

    Returns:
        The first profile.
    """
    checks = PaceChecks(run.group, run.device)
    workloads = workloads_of(run.graph, run.group.size, run.memory_format)
    measuring = OperatorSamples(run, workloads, checks)
    measuring.measure()
    measuring.measure_disturbed()
    measuring.measure_uncertain()
    samples = measuring.samples
    if missing := len(workloads) - len(samples):
        run.say.line(
            f"{missing} smaller operators were left to the fitted roofline; --budget would "
            "allow more"
        )
    bandwidth = timer.copy_bandwidth(run.device)
    measured = samples, workloads, bandwidth, run.memory_format
    mine = device_model(run.name, run.device, *measured)
    devices = tuple(all_gather_object(run.group, mine))
    before = len(checks)
    profile = _with_links(run, devices, checks)
    profile = with_overlap(profile, run.graph, run.job.mode, run.device, run.say)
    links_slower = max(checks.slowdowns()[before:], default=1.0)
    of_links = pace.disturbances("links", links_slower)
    return replace(profile, disturbed=measuring.disturbances() + of_links)


def _with_links(
    run: Run, devices: tuple[DeviceModel, ...], checks: PaceChecks
) -> ClusterProfile:
    """Measures links, in a part of the budget: large messages on fast links alone."""
    allowed_s = LINKS_PART * run.job.budget
    links = link_models(
        run.group, run.device, allowed_s=allowed_s, after_visit=checks.check
    )
    profile = ClusterProfile(devices, links, nodes=nodes_of(devices))
    for pair, link in profile.links.items():
        run.say.detail(
            f"link {pair}: {link.latency_s * 1e6:.0f} us, {1e-9 / link.s_per_byte:.2f} GB/s"
        )
    profile = with_contention(profile, run.group, run.device, allowed_s)
    checks.check()
    summing_ns = profile.sum_s_per_byte * 1e9
    run.say.detail(
        f"sums of gradients: {summing_ns:.2f} ns a byte beside their messages"
    )
    return profile


def chunks(run: Run, profile: ClusterProfile) -> ClusterProfile:
    """Measures in how many chunks filter splits are best gathered. Collective.

    Args:
        run: the job; in training there is nothing to measure.
        profile: what is known so far.

    Returns:
        The profile with the chunks of the plan's filter splits.
    """
    if run.job.mode != "infer":
        return profile
    plan = make_plan(run.graph, profile, mode=run.job.mode)
    found = tune_chunks(
        plan, run.device, run.passed(part_of(run, CHUNKS_PART)), run.say
    )
    return replace(
        profile,
        chunks=tuple(replace(c, measured=run.conditions) for c in found),
    )


def tiles(run: Run, profile: ClusterProfile) -> ClusterProfile:
    """Tunes tiles of the plan's passes on GPUs. Collective.

    It is the last stage, with the rest saved: a kernel can take the whole process with
    it.

    Args:
        run: the job; without a GPU there is nothing to tune.
        profile: what is known so far.

    Returns:
        The profile with the tiles.
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
