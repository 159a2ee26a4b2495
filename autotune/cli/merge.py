"""``hetconv merge``: one profile of several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

from hetconv.errors import ProfileError, few
from hetconv.schemas.cluster_profile import ClusterProfile, between_nodes, nodes_of
from hetconv.schemas.device_model import (
    DeviceModel,
    LinkModel,
    OperatorModel,
    SharedWire,
)
from hetconv.schemas.provenance import DeviceIdentity, MeasurementConditions
from hetconv.schemas.tuning_results import TunedTile

T = TypeVar("T")
SAME_PROBLEM: dict[str, Callable[[Any], object]] = {
    "tuned": lambda ratio: (ratio.graph, ratio.mode, ratio.kind),
    "chunks": lambda chunks: (chunks.spec, chunks.sizes),
    "plans": lambda plan: (plan.graph, plan.mode),
}
"""The fields of a profile that belong to all its devices together, and by what two
entries are of the same.
"""


class Place(NamedTuple):
    """What identifies a rank in every profile.

    Attributes:
        device: its device.
        among: its number among the ranks that share the device.
    """

    device: DeviceIdentity
    among: int


@dataclass(frozen=True)
class Source:
    """A profile that is merged.

    Attributes:
        name: of its file.
        profile: the profile.
        places: of its ranks.
    """

    name: str
    profile: ClusterProfile
    places: tuple[Place, ...]

    def ranks_of(self, places: Sequence[Place]) -> list[int] | None:
        """Returns the ranks of these places in this profile; None if one is missing."""
        if not set(places) <= set(self.places):
            return None
        return [self.places.index(place) for place in places]


def merge(
    profiles: Mapping[str, ClusterProfile], between: str | None = None
) -> tuple[ClusterProfile, list[str]]:
    """Merges profiles into one of all devices.

    Of what several profiles measured on the same device, or between the same two, the newest
    counts, and what was measured before what was estimated. What belongs to all devices
    together comes from the newest profile of all of them; if there is none, the worst value
    counts.

    Args:
        profiles: by the name of the file.
        between: a known link that connects the hosts between which nothing was measured.

    Returns:
        The profile, and lines that say what was left out.

    Raises:
        ProfileError: a device has no identity, profiles contradict each other, or links are
            missing.
    """
    sources = [
        Source(name, profile, _places(name, profile))
        for name, profile in profiles.items()
    ]
    _check_identities(sources)
    found = dict.fromkeys(place for source in sources for place in source.places)
    hosts = list(dict.fromkeys(place.device.host for place in found))
    places = sorted(found, key=lambda place: hosts.index(place.device.host))
    devices = tuple(
        _device(
            [s.profile.devices[s.places.index(p)] for s in sources if p in s.places]
        )
        for p in places
    )
    nodes = nodes_of(devices)
    links, missing = _links(sources, places)
    joining, cards = _joined(missing, places, nodes, hosts, between)
    wires = [_moved(w, s, places) for s in sources for w in s.profile.shared]
    tuned, left_out = _of_all(sources, places)
    merged = ClusterProfile(
        devices,
        links | joining,
        estimated=all(source.profile.estimated for source in sources),
        shared=_wires([*wires, *cards]),
        nodes=nodes,
        **tuned,
        **_by_age(sources, places),
    )
    if between is not None:
        said = {**merged.fingerprint, "between": between}
        merged = replace(merged, fingerprint=said)
    return merged, left_out


def _by_age(sources: Sequence[Source], places: Sequence[Place]) -> dict[str, Any]:
    """Returns fields of all devices together: the newest, or the worst value."""
    by_age = sorted(
        sources,
        key=lambda source: max(_at(one.measured) for one in source.profile.devices),
    )
    fingerprint: dict[str, str] = {}
    tiles: dict[object, TunedTile] = {}
    for source in by_age:
        fingerprint |= source.profile.fingerprint
        for t in source.profile.tiles:
            tiles[t.device, t.torch, t.triton, t.what, t.spec, t.precision] = t
    whole = [source.profile for source in by_age if source.ranks_of(places) is not None]
    shown = whole[-1:] or [source.profile for source in sources]
    return {
        "fingerprint": fingerprint,
        "tiles": tuple(tiles.values()),
        "overlap": min(p.overlap for p in shown),
        "sum_s_per_byte": max(p.sum_s_per_byte for p in shown),
        "latency_at_work": max(p.latency_at_work for p in shown),
        "bytes_at_work": max(p.bytes_at_work for p in shown),
        "disturbed": tuple(d for source in by_age for d in source.profile.disturbed),
    }


def _places(name: str, profile: ClusterProfile) -> tuple[Place, ...]:
    seen: Counter[DeviceIdentity] = Counter()
    places = []
    for rank, device in enumerate(profile.devices):
        if device.identity is None:
            raise ProfileError(
                f"{name}: rank {rank}, {device.name!r}, does not say which device it is, as "
                "those of data sheets and "
                "of files of older versions do not; measure it with hetconv autotune, and "
                "merge what that writes"
            )
        places.append(Place(device.identity, seen[device.identity]))
        seen[device.identity] += 1
    return tuple(places)


def _check_identities(sources: Sequence[Source]) -> None:
    """Raises `ProfileError` for a GPU on two hosts or with two names, or a host with two CPUs."""
    first: dict[str, tuple[str, tuple[str, ...]]] = {}
    for source in sources:
        for device in source.profile.devices:
            i = device.identity
            assert i is not None
            what, is_ = (
                (i.unit, (i.hardware, i.host))
                if device.kind == "cuda"
                else (f"the CPU of {i.host}", (i.hardware,))
            )
            name, was = first.setdefault(what, (source.name, is_))
            if was != is_:
                raise ProfileError(
                    f"{what} is {' on '.join(was)} in {name}, but {' on '.join(is_)} in "
                    f"{source.name}; where two hosts "
                    "share a name, or one got another, give each its own and measure anew "
                    "with hetconv autotune"
                )


def _at(measured: MeasurementConditions | None) -> tuple[bool, str]:
    """Returns a key by which newer measurements are greater."""
    return measured is not None, measured.at if measured is not None else ""


def _newest(entries: Iterable[T], measured: Any = lambda entry: entry.measured) -> T:
    """Returns the newest entry; of equal ones the last."""
    return sorted(entries, key=lambda entry: _at(measured(entry)))[-1]


def _device(models: Sequence[DeviceModel]) -> DeviceModel:
    """Returns the newest model of a device, with the newest of each operator."""
    newest = _newest(models)
    known = [m for m in models if (m.measured is None) is (newest.measured is None)]
    operators = _operators([(m.operators, m.measured) for m in known], newest.measured)
    others = _operators([(m.others, m.measured) for m in known], newest.measured)
    # What does not say its own versions has to be of the newest's.
    same = sorted(
        (m for m in known if _versions(m) == _versions(newest)),
        key=lambda model: _at(model.measured),
    )
    corrections = {
        kind: factor for model in same for kind, factor in model.corrections.items()
    }
    copying = [m.copying for m in same if m.copying is not None]  # by itself none
    return replace(
        newest,
        operators=operators,
        others=others,
        corrections=corrections,
        copying=copying[-1] if copying else None,
    )


def _operators(
    found: Sequence[tuple[Mapping[str, OperatorModel], MeasurementConditions | None]],
    with_device: MeasurementConditions | None,
) -> dict[str, OperatorModel]:
    """Returns the newest of each operator, with its conditions if they are not the device's."""
    by_key: dict[str, list[OperatorModel]] = {}
    for operators, measured in found:
        for key, operator in operators.items():
            by_key.setdefault(key, []).append(
                replace(operator, measured=operator.measured or measured)
            )
    newest = {key: _newest(all_) for key, all_ in by_key.items()}
    return {
        k: replace(o, measured=None) if o.measured == with_device else o
        for k, o in newest.items()
    }


def _versions(device: DeviceModel) -> MeasurementConditions | None:
    return replace(device.measured, at="") if device.measured is not None else None


def _links(
    sources: Sequence[Source], places: Sequence[Place]
) -> tuple[dict[str, LinkModel], list[tuple[int, int]]]:
    """Returns the newest link of each pair of ranks, and the pairs that have none."""
    links: dict[str, LinkModel] = {}
    missing = []
    for a, b in combinations(range(len(places)), 2):
        found = [
            s.profile.link(*ranks)
            for s in sources
            if (ranks := s.ranks_of((places[a], places[b]))) is not None
        ]
        if found:
            links[f"{a}-{b}"] = _newest(found)
        else:
            missing.append((a, b))
    return links, missing


def _joined(
    missing: Sequence[tuple[int, int]],
    places: Sequence[Place],
    nodes: Sequence[Sequence[int]],
    hosts: Sequence[str],
    between: str | None,
) -> tuple[dict[str, LinkModel], tuple[SharedWire, ...]]:
    """Returns known links for the missing pairs, and the network cards that they share."""
    if within := [
        pair
        for pair in missing
        if places[pair[0]].device.host == places[pair[1]].device.host
    ]:
        said = few(f"{places[a].device} and {places[b].device}" for a, b in within)
        raise ProfileError(
            f"nothing was measured between {said}; name both in one hetconv autotune --devices"
        )
    if missing and between is None:
        said = few(
            sorted(
                {
                    " and ".join((places[a].device.host, places[b].device.host))
                    for a, b in missing
                }
            )
        )
        raise ProfileError(
            f"nothing was measured between {said}; give --between, as in ethernet-100g"
        )
    if not missing:
        if between is not None:
            raise ProfileError(
                f"--between is {between}, but all links are in the profiles; leave it out"
            )
        return {}, ()
    links, cards = between_nodes(nodes, between, hosts)
    used = {pair for a, b in missing for pair in ((a, b), (b, a))}
    # What was measured had its card in it.
    wires = (
        replace(card, pairs=tuple(pair for pair in card.pairs if pair in used))
        for card in cards
    )
    return {f"{a}-{b}": links[f"{a}-{b}"] for a, b in missing}, tuple(
        wire for wire in wires if wire.pairs
    )


def _moved(wire: SharedWire, source: Source, places: Sequence[Place]) -> SharedWire:
    """Returns a wire with the ranks of the merged profile."""
    rank = [places.index(place) for place in source.places]
    return replace(wire, pairs=tuple((rank[a], rank[b]) for a, b in wire.pairs))


def _wires(shared: Iterable[SharedWire]) -> tuple[SharedWire, ...]:
    """Joins wires of one name: all their pairs, and the newest speed."""
    found: dict[str, list[SharedWire]] = {}
    for wire in shared:
        found.setdefault(wire.name, []).append(wire)
    pairs = {
        name: dict.fromkeys(pair for wire in wires for pair in wire.pairs)
        for name, wires in found.items()
    }
    return tuple(
        replace(_newest(wires), pairs=tuple(pairs[name]))
        for name, wires in found.items()
    )


def _of_all(
    sources: Sequence[Source], places: Sequence[Place]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the newest tuning results of these devices, and lines for those left out."""
    found: dict[str, dict[object, list[Any]]] = {field: {} for field in SAME_PROBLEM}
    left_out = []
    for source in sources:
        tuned = {field: getattr(source.profile, field) for field in SAME_PROBLEM}
        if source.places == tuple(places):
            for field, key in SAME_PROBLEM.items():
                for entry in tuned[field]:
                    found[field].setdefault(key(entry), []).append(entry)
        elif count := sum(map(len, tuned.values())):
            said = "entries that were" if count > 1 else "entry that was"
            left_out.append(
                f"{source.name}: {count} {said} tuned on other devices, or in another order, "
                "left out"
            )
    return {
        field: tuple(map(_newest, entries.values())) for field, entries in found.items()
    }, left_out
