"""What the page says of a profile and what was measured for it, without any layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetconv.autotune.search.record import Record, Study
from hetconv.errors import PlanError, few
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import LinkModel
from hetconv.schemas.plan import Plan
from hetconv.schemas.tuning_results import TunedPlan

from .plan_contents import PlanContents, contents_of
from .profile_text import (
    DEVICE_HEADS,
    device_cells,
    disturbance,
    latency_text,
    message_lines,
    origin_lines,
    tuned_lines,
)
from .step_times import (
    TUNED_LABEL,
    WAY_HEADS,
    Summary,
    Way,
    way_cells,
)
from .tables import Cells, Table
from .text import ESTIMATED, count, gb_per_s

MAX_PAIRS_SHOWN = 6  # of a row of links that are alike


@dataclass(frozen=True)
class Tuning:
    """What a tuning job knows beside its profile.

    Attributes:
        record: What the job measured.
        summary: Its result.
    """

    record: Record
    summary: Summary


@dataclass(frozen=True)
class Contents:
    """Contents of the page.

    Attributes:
        title: Title.
        subtitle: What it is about, in one line.
        warnings: Why numbers may be wrong: nothing was measured, or in a disturbed hour.
        facts: Label, number and a note of each of the few most important numbers.
        devices: Table of devices.
        links: Table of links; None for one device.
        messages: Lines of what messages take beside the links.
        plan: Contents of the plan, if one is given.
        steps: Tables of whole steps, measured and predicted.
        corrections: Table of factors that whole steps taught; None where there are none.
        tuned: Lines of what was tuned.
        studies: Table of the trials of each study.
        origins: Lines of where the numbers come from.
    """

    title: str
    subtitle: str
    warnings: Cells
    facts: tuple[tuple[str, str, str], ...]
    devices: Table
    links: Table | None
    messages: Cells
    plan: PlanContents | None
    steps: tuple[Table, ...]
    corrections: Table | None
    tuned: Cells
    studies: tuple[Table, ...]
    origins: Cells


def read(
    profile: ClusterProfile, plan: Plan | None = None, tuning: Tuning | None = None
) -> Contents:
    """Collects the contents of the page.

    Args:
        profile: Profile of the cluster.
        plan: Plan for its devices.
        tuning: What the job that measured the profile knows.

    Raises:
        PlanError: The plan is for other devices.
    """
    if plan is not None and plan.devices != profile.names:
        raise PlanError(
            f"the plan is for {few(plan.devices)}, but the profile has "
            f"{few(profile.names)}; give the profile that the plan was made from"
        )
    told = contents_of(profile, plan) if plan is not None else None
    return Contents(
        told.title if told else f"Cluster of {count(profile.world, 'device')}",
        told.subtitle if told else ", ".join(dict.fromkeys(profile.names)),
        tuple(_warnings(profile, tuning)),
        told.facts if told else tuple(_facts(profile)),
        _devices(profile),
        _links(profile),
        tuple(message_lines(profile)),
        told,
        tuple(_steps(profile, tuning)),
        _corrections(profile),
        tuple(tuned_lines(profile)),
        tuple(_trials(study) for study in studies_of(tuning)),
        tuple(origin_lines(profile)),
    )


def _warnings(profile: ClusterProfile, tuning: Tuning | None) -> Iterator[str]:
    if profile.estimated:
        yield ESTIMATED
    if tuning is not None:
        yield from tuning.summary.warnings
    elif (warning := disturbance(profile)) is not None:
        yield warning


def studies_of(tuning: Tuning | None) -> tuple[Study, ...]:
    """Returns the studies that have trials."""
    studies = tuning.record.studies if tuning is not None else ()
    return tuple(study for study in studies if study.trials)


def _facts(profile: ClusterProfile) -> Iterator[tuple[str, str, str]]:
    yield "Devices", str(profile.world), count(len(profile.nodes), "node")
    operators = {key for device in profile.devices for key in device.operators}
    yield "Operators measured", str(len(operators)), "convolutions and linear layers"
    yield "Plans tuned", str(len(profile.plans)), "on whole steps"


def _devices(profile: ClusterProfile) -> Table:
    rows = [device_cells(rank, device) for rank, device in enumerate(profile.devices)]
    if len(profile.nodes) == 1:
        return Table("Devices", DEVICE_HEADS, tuple(rows))
    node_of = {rank: k for k, node in enumerate(profile.nodes) for rank in node}
    return Table(
        "Devices",
        (*DEVICE_HEADS[:2], "node", *DEVICE_HEADS[2:]),
        tuple(
            (*row[:2], str(node_of[rank]), *row[2:]) for rank, row in enumerate(rows)
        ),
    )


def _links(profile: ClusterProfile) -> Table | None:
    """A row for links that are alike, as those of data sheets are."""
    alike: dict[Cells, list[str]] = {}
    for pair, link in profile.links.items():
        alike.setdefault(_link_cells(link), []).append(pair)
    rows = tuple((_pairs(pairs), *cells) for cells, pairs in alike.items())
    heads = "between ranks", "latency", "bandwidth", "back"
    return Table("Links", heads, rows) if rows else None


def _link_cells(link: LinkModel) -> Cells:
    there, back = link.s_per_byte, link.turned().s_per_byte
    return latency_text(link), gb_per_s(there), gb_per_s(back)


def _pairs(pairs: list[str]) -> str:
    shown = ", ".join(pairs[:MAX_PAIRS_SHOWN])
    more = len(pairs) - MAX_PAIRS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def ways_of(best: TunedPlan) -> tuple[tuple[str, Way], ...]:
    """Returns the tuned plan, the even split and the device alone, as a profile has them."""
    beside = ("even", best.even, best.even_s), ("alone", best.alone, best.alone_s)
    return (
        (TUNED_LABEL, Way(best.name, best.step_s, best.predicted_s)),
        *((label, Way(name, s)) for label, name, s in beside if name is not None),
    )


def _steps(profile: ClusterProfile, tuning: Tuning | None) -> Iterator[Table]:
    """The job's own model first, of which more is predicted than a profile keeps."""
    own: tuple[str, str] | None = None
    if tuning is not None:
        s = tuning.summary
        own = tuning.record.graph.digest, s.mode
        yield Table(f"{s.model}, {s.mode}", WAY_HEADS, tuple(way_cells(s.ways)))
    for best in profile.plans:
        if (best.graph, best.mode) != own:
            title = f"model {best.graph}, {best.mode}"
            yield Table(title, WAY_HEADS, tuple(way_cells(ways_of(best))))


def _corrections(profile: ClusterProfile) -> Table | None:
    kinds = dict.fromkeys(kind for d in profile.devices for kind in d.corrections)
    rows = tuple(
        (
            f"{rank}: {device.name}",
            *(
                f"{device.corrections[kind]:.3f}" if kind in device.corrections else "-"
                for kind in kinds
            ),
        )
        for rank, device in enumerate(profile.devices)
    )
    title = "Factors that whole steps taught, by kind of split"
    return Table(title, ("device", *kinds), rows) if kinds else None


def _trials(study: Study) -> Table:
    known = [t.value for t in study.trials if t.value is not None]
    return Table(
        study.title,
        ("trial", "what", "of the baseline", "why it failed"),
        tuple(
            (
                str(k + 1),
                trial.what,
                f"{trial.value:.3f}" if trial.value is not None else "-",
                trial.why,
            )
            for k, trial in enumerate(study.trials)
        ),
        frozenset(
            k
            for k, trial in enumerate(study.trials)
            if known and trial.value == min(known)
        ),
    )


def stage_lines(tuning: Tuning) -> Iterator[str]:
    """Yields how long each stage of the job took."""
    for stage, seconds in tuning.record.stage_s.items():
        took = f"{seconds:.1f} s" if seconds is not None else "by an earlier run"
        yield f"{stage}: {took}"
