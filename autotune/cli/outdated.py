"""Measurements of a profile that were made with other versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hetconv.errors import few
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.provenance import MeasurementConditions

REMEDY = "measure anew with hetconv autotune"
OPERATOR = "operator"


class Entry(NamedTuple):
    """A measurement.

    Attributes:
        of: kind of the measured thing.
        name: its name.
        host: where it was measured, if that is known.
        measured: its conditions.
    """

    of: str
    name: str
    host: str
    measured: MeasurementConditions


def stale(
    profile: ClusterProfile, in_use: tuple[str, MeasurementConditions] | None = None
) -> list[str]:
    """Returns a line for each reason: what is outdated, and what to do.

    Args:
        profile: the profile.
        in_use: host and versions of this process. Without it, measurements are compared
            with the newest of the same host, and with the newest of all.
    """
    entries = list(_entries(profile))
    newest = {
        (e.host, bool(e.measured.driver)): e.measured
        for e in sorted(entries, key=lambda e: e.measured.at)
    }
    if in_use is not None:
        newest |= {(in_use[0], driver): in_use[1] for driver in (False, True)}
    everywhere = (
        in_use[1]
        if in_use is not None
        else max(newest.values(), key=lambda c: c.at, default=None)
    )
    found: dict[str, dict[str, list[str]]] = {}  # names by reason and kind
    for e in entries:
        assert everywhere is not None  # there are entries
        differs = (
            _differs(e.measured, newest[e.host, bool(e.measured.driver)])
            if e.host
            else []
        ) or _differs(_public(e.measured), _public(everywhere))
        if differs:
            kinds = found.setdefault(", ".join(differs), {})
            kinds.setdefault(e.of, []).append(e.name)
    return [
        f"measured with {why}: {'; '.join(map(_line, kinds, kinds.values()))}; {REMEDY}"
        for why, kinds in found.items()
    ]


def _line(of: str, names: list[str]) -> str:
    """Returns what is outdated of one kind; operators are many and have long names."""
    operators = names.count(OPERATOR)
    others = [name for name in names if name != OPERATOR]
    counted = [f"{operators} operator{'s' * (operators > 1)}"] * (operators > 0)
    return f"{of}: {few(others + counted)}"


def _differs(measured: MeasurementConditions, now: MeasurementConditions) -> list[str]:
    """Returns the versions that differ; unknown ones do not, except torch's."""
    if not measured.torch:
        return ["versions that the file does not tell"]
    return [
        f"{what} {was} (now {is_})"
        for what in ("torch", "triton", "driver")
        if (was := getattr(measured, what))
        and (is_ := getattr(now, what))
        and was != is_
    ]


def _public(conditions: MeasurementConditions) -> MeasurementConditions:
    """Returns the versions that hosts have in common: torch without its build, no driver."""
    return MeasurementConditions(
        conditions.at, conditions.torch.partition("+")[0], conditions.triton
    )


def _entries(profile: ClusterProfile) -> Iterator[Entry]:
    hosts = [d.identity.host if d.identity else "" for d in profile.devices]
    for rank, device in enumerate(profile.devices):
        of = f"rank {rank}, {device.name}"
        if device.measured is not None:
            yield Entry(of, "rates", hosts[rank], device.measured)
        for operator in (*device.operators.values(), *device.others.values()):
            if (measured := operator.measured or device.measured) is not None:
                yield Entry(of, OPERATOR, hosts[rank], measured)
    for pair, link in profile.links.items():
        if link.measured is not None:
            yield Entry(
                "links", pair, hosts[int(pair.partition("-")[0])], link.measured
            )
    for wire in profile.shared:
        if wire.measured is not None and wire.pairs:
            yield Entry(
                "shared wires", wire.name, hosts[wire.pairs[0][0]], wire.measured
            )
    for ratio in profile.tuned:
        if ratio.measured is not None:
            yield Entry(
                "tuned ratios",
                f"{ratio.mode} by {ratio.kind} of {ratio.graph}",
                hosts[0],
                ratio.measured,
            )
    for plan in profile.plans:
        if plan.measured is not None:
            yield Entry(
                "tuned plans", f"{plan.mode} of {plan.graph}", hosts[0], plan.measured
            )
    for chunks in profile.chunks:
        if chunks.measured is not None:
            yield Entry(
                "chunks",
                f"of {'x'.join(map(str, chunks.spec.x_shape))}",
                hosts[0],
                chunks.measured,
            )
    for tile in profile.tiles:
        shape = "x".join(map(str, tile.spec.x_shape))
        yield Entry(
            f"tiles of {tile.device}",
            f"{tile.what} of {shape}",
            "",
            MeasurementConditions("", tile.torch, tile.triton),
        )
