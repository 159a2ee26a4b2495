"""Links between ranks: every message of both ways and what is left when all send at
once, on ranks and on numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hetconv.autotune.measure import links
from hetconv.comm import call_tags
from hetconv.comm.rank_group import (
    RankGroup,
    count_sent,
    rank_group_of,
    through_backend,
)
from hetconv.cost.network import Network
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import Copying, DeviceModel, LinkModel, SharedWire
from hetconv.schemas.provenance import DeviceIdentity, MeasurementConditions
from tests.spawn import on_ranks

CPU = torch.device("cpu")
DEVICE = DeviceModel("cpu", "cpu", 8e9, {"float32": 1e11}, 1e10)
KILOBYTE = 1 << 10
NOW = MeasurementConditions("2026-01-01T00:00:00Z", "2.13")


def cluster(hosts: str, s_per_byte: float = 1e-9) -> ClusterProfile:
    """A rank per letter, which names its host."""
    devices = tuple(
        replace(DEVICE, identity=DeviceIdentity(host, "cpu", "1 thread"))
        for host in hosts
    )
    nodes = tuple(
        tuple(r for r, at in enumerate(hosts) if at == host)
        for host in dict.fromkeys(hosts)
    )
    pairs = {
        f"{a}-{b}": LinkModel(0.0, s_per_byte)
        for b in range(len(hosts))
        for a in range(b)
    }
    return ClusterProfile(devices, pairs, nodes=nodes)


def every_link(sizes: tuple[int, ...]) -> tuple[dict[str, LinkModel], dict[int, int]]:
    group = rank_group_of()
    call_tags.enter(f"the last call on rank {group.rank}")
    with pytest.MonkeyPatch.context() as patch, count_sent() as sent:
        patch.setattr(links, "conditions", lambda _: NOW)
        found = links.link_models(group, CPU, sizes)
    return found, dict(sent)


def test_every_link_is_measured_each_way_and_known_to_all() -> None:
    sizes = KILOBYTE, 64 * KILOBYTE
    found = on_ranks(3, every_link, sizes)
    models = found[0][0]
    assert all(known == models for known, _ in found)
    assert list(models) == ["0-1", "0-2", "1-2"]
    assert all(
        m.latency_s > 0 and m.s_per_byte > 0 and m.back_s_per_byte
        for m in models.values()
    )
    assert all(m.measured == NOW for m in models.values())
    # A message of each size and of nothing, each of which a tiny one answers: as often
    # to every other rank.
    once = links._repeats(0)
    expected = links.VISITS * once * (sum(sizes) + links.ANSWER_BYTES * (1 + 3))
    expected += once * (links.PROBE_BYTES + links.ANSWER_BYTES)
    assert [sent for _, sent in found] == [
        {other: expected for other in range(3) if other != r} for r in range(3)
    ]


@pytest.mark.parametrize(
    ("allowed_s", "largest"),
    [(inf, 1 << 26), (60.0, 1 << 22), (3.0, 1 << 16), (0.0, 1 << 13)],
)
def test_slow_links_are_measured_with_small_messages(
    allowed_s: float, largest: int
) -> None:
    """At 25 MB/s each way, 64 MiB take 2.7 s: 80 s for all visits of two directions."""
    sizes = links._affordable(links.LINK_BYTES, 2 / 25e6, allowed_s)
    assert sizes == tuple(n for n in links.LINK_BYTES if n <= largest)


def slow_link() -> tuple[set[int], int]:
    """The sizes that are sent over a link of 25 MB/s, and how often it was visited."""
    seen, visits = set[int](), []

    def slow(_: Any, a: int, b: int, size: int, device: Any) -> list[float]:
        seen.add(size)
        return [1e-4 + size / 25e6]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_round_trips", slow)
        links.link_models(
            rank_group_of(), CPU, allowed_s=3.0, after_visit=lambda: visits.append(1)
        )
    return seen, len(visits)


def test_the_time_that_is_allowed_holds_for_all_links() -> None:
    for seen, visits in on_ranks(2, slow_link):
        assert seen == {links.ANSWER_BYTES, 1 << 10, 1 << 13, 1 << 16}
        assert visits == links.VISITS


def lopsided() -> LinkModel:
    """A byte takes two seconds from rank 0 and three from rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            links,
            "_round_trips",
            lambda _, sender, __, size, ___: [
                100.0 + (2 + sender) * (size - links.ANSWER_BYTES)
            ],
        )
        return links.link_models(rank_group_of(), CPU, (100, 1000))["0-1"]


def test_each_way_is_the_sender_s() -> None:
    for link in on_ranks(2, lopsided):
        assert (link.s_per_byte, link.back_s_per_byte) == (
            pytest.approx(2.0),
            pytest.approx(3.0),
        )


def test_a_message_takes_what_its_answer_did_not() -> None:
    assert links._one_way([5.0, 3.0, 1.0], [2.0, 2.0, 9.0]) == [4.0, 2.0, 1.0]


def at_once(hosts: str, slow: bool, by_backend: bool = True) -> ClusterProfile:
    """With links that are said to be so fast, or so slow, that contention shows, or does not."""
    with (
        pytest.MonkeyPatch.context() as patch,
        through_backend() if by_backend else nullcontext(),
    ):
        patch.setattr(links, "conditions", lambda _: NOW)
        patch.setattr(links, "COPY_BYTES", (KILOBYTE, 64 * KILOBYTE))
        patch.setattr(links, "EXCHANGE_BYTES", (KILOBYTE, 64 * KILOBYTE))
        patch.setattr(links, "SUM_BYTES", (KILOBYTE, 64 * KILOBYTE))
        return links.with_contention(
            cluster(hosts, 1.0 if slow else 1e-15), rank_group_of(), CPU
        )


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("a", []),
        ("aa", ["host a"]),
        (
            "aba",
            [
                "host a",
                "card of a, out",
                "card of a, in",
                "card of b, out",
                "card of b, in",
            ],
        ),
    ],
)
def test_what_ranks_share_shows_when_all_send(hosts: str, names: list[str]) -> None:
    found = on_ranks(len(hosts), at_once, hosts, False)
    assert all(profile == found[0] for profile in found)
    wires = {wire.name: wire for wire in found[0].shared}
    assert list(wires) == names
    assert all(wire.s_per_byte > 0 and wire.measured == NOW for wire in wires.values())
    if hosts == "aba":
        assert wires["host a"].pairs == ((0, 2), (2, 0))
        assert (
            wires["card of a, out"].pairs
            == wires["card of b, in"].pairs
            == ((0, 1), (2, 1))
        )
        assert wires["card of b, out"].pairs == ((1, 0), (1, 2))
    slow = on_ranks(len(hosts), at_once, hosts, True)
    assert slow[0].shared == ()
    assert slow[0].sum_s_per_byte == 0.0


def test_ranks_of_a_host_know_what_their_copies_take_and_have_no_wire() -> None:
    found = on_ranks(3, at_once, "aba", False, False)
    assert all(profile == found[0] for profile in found)
    assert [device.copying is None for device in found[0].devices] == [
        False,
        True,
        False,
    ]
    both = (found[0].devices[0].copying, found[0].devices[2].copying)
    assert all(s > 0 for c in both if c is not None for s in (c.sends, c.joins, c.adds))
    assert [wire.name for wire in found[0].shared if wire.name.startswith("host")] == []


def told_to_copy(part: float) -> list[Copying | None]:
    """Rank 0 sends a byte in 2 seconds, joins in 3 and adds in 7, rank 1 twice as
    slowly; calls take both a second.
    """
    rank, step = rank_group_of().rank, count()

    def timed(
        group: RankGroup, action: Callable[[], Any], device: torch.device
    ) -> tuple[float, Any]:
        given = action()
        if callable(given):
            return 1 + (1 + rank) * 2 * sizes[next(step) // 2], given
        joins = given.shape[1] == 2 * links.CHANNELS
        return 1 + (1 + rank) * (3 * 2 if joins else 7) * sizes[next(step) // 2], given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "COPY_BYTES", (4 * links.ROW_BYTES, 16 * links.ROW_BYTES))
        visit = [
            size
            for _ in (False, True)
            for size in links.COPY_BYTES
            for _ in range(links._repeats(size))
        ]
        sizes = visit * links.VISITS
        patch.setattr(links, "_time_own", timed)
        patch.setattr(links, "core_share", lambda _: part)
        return links._copying([(0, 1)], rank_group_of(), CPU)


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_what_copies_take_is_told_by_the_byte_and_longer_on_part_of_a_core(
    part: float,
) -> None:
    found = on_ranks(2, told_to_copy, part)
    assert found[0] == found[1]
    for rank, one in enumerate(found[0]):
        assert one is not None
        assert (one.sends, one.joins, one.adds) == pytest.approx(
            [(1 + rank) * s / part for s in (2, 3, 7)], rel=1e-6
        )


def gathered(hosts: str) -> tuple[tuple[int, ...], dict[int, int]]:
    profile = cluster(hosts)
    with count_sent() as sent:
        whole = links._gather(
            profile.nodes, rank_group_of(), 2 * links.ROW_BYTES, CPU
        )()()
    return tuple(whole.shape), dict(sent)


def test_every_host_gathers_an_image_of_its_own() -> None:
    part, shape = 2 * links.ROW_BYTES, (1, 2 * links.CHANNELS, 2, links.WIDTH)
    found = on_ranks(4, gathered, "abba")
    assert [sent for _, sent in found] == [{3: part}, {2: part}, {1: part}, {0: part}]
    assert {s for s, _ in found} == {shape}
    assert on_ranks(3, gathered, "aba")[1] == ((1, links.CHANNELS, 2, links.WIDTH), {})


def summed() -> int:
    with count_sent() as sent:
        (gradient,) = links._sum(rank_group_of(), 8 * links.ROW_BYTES, CPU)()
    assert gradient.is_contiguous(memory_format=torch.channels_last)
    assert set(gradient.flatten().tolist()) == {2.0}
    return sum(sent.values())


def test_sums_are_those_of_a_parameter_s_gradients() -> None:
    assert on_ranks(2, summed) == [8 * links.ROW_BYTES] * 2


def test_what_sums_take_beside_their_messages_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half a second for nothing and three nanoseconds for a byte, of which the link
    takes one; gathers are as fast.
    """

    def told(group: Any, actions: dict[int, str], device: Any) -> dict[int, Any]:
        return {
            size: np.full((3, 2), seconds[action] + size * per_byte[action])
            for size, action in actions.items()
        }

    seconds, per_byte = {"gather": 0.0, "sum": 0.5}, {"gather": 1e-9, "sum": 3e-9}
    monkeypatch.setattr(links, "_time_all", told)
    monkeypatch.setattr(links, "_copying", lambda *_: [None, None])
    monkeypatch.setattr(links, "_gather", lambda *_: "gather")
    monkeypatch.setattr(links, "partial", lambda _, start: start)
    monkeypatch.setattr(links, "_sum", lambda *_: "sum")
    two: Any = SimpleNamespace(rank=0, size=2)
    found = links.with_contention(cluster("aa"), two, CPU)
    assert found.shared == ()
    assert found.sum_s_per_byte == pytest.approx(2e-9, rel=0.05)


@pytest.mark.parametrize(("s_per_byte", "matters"), [(0.51e-9, False), (0.6e-9, True)])
def test_a_wire_matters_that_is_slower_than_its_links(
    s_per_byte: float, matters: bool
) -> None:
    """Both ways at once through one wire: alone each byte takes a nanosecond, so
    together two take as long.
    """
    wire = SharedWire("host", ((0, 1), (1, 0)), s_per_byte)
    assert links._is_slower(wire, Network.of(cluster("aa"))) is matters


def test_a_network_knows_both_ways_of_a_link() -> None:
    link = LinkModel(1.0, 2.0, back_s_per_byte=3.0)
    profile = ClusterProfile((DEVICE,) * 2, {"0-1": link})
    assert profile.link(0, 1) == link
    assert profile.link(1, 0) == LinkModel(1.0, 3.0, back_s_per_byte=2.0)
    assert Network.of(profile).s_per_byte.tolist() == [[0, 2], [3, 0]]
    assert profile.link(1, 0).turned() == link
    assert np.array_equal(Network.of(cluster("aa")).s_per_byte, [[0, 1e-9], [1e-9, 0]])
