"""How fast messages travel: every link alone, each way, and what is left of it when all
ranks send at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations, product
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch

from hetconv.comm import call_tags
from hetconv.comm.exchange import PendingExchange
from hetconv.comm.rank_group import RankGroup, all_gather_object, shared_memory_channels
from hetconv.comm.redistribute import start_sum
from hetconv.cost.network import Network
from hetconv.runtime.gradient_sync import GradientSync
from hetconv.schemas.cluster_profile import (
    ClusterProfile,
    Copying,
    LinkModel,
    SharedWire,
)
from hetconv.sharding.layout import Box

from . import fit
from .barrier import meet, parts_of_core
from .device_info import conditions
from .timer import timed

T = TypeVar("T")
TINY = 4  # bytes
SIZES = tuple(1 << n for n in (10, 13, 16, 19, 22, 26))  # bytes
COPIES = tuple(
    1 << n for n in (18, 20, 22, 24)
)  # bytes that a rank sends; small ones lie in caches, large ones do not
PARTS = tuple(
    1 << n for n in (16, 19, 22)
)  # bytes that a rank sends to each, when all do
SUMS = tuple(1 << n for n in (18, 20, 23))  # bytes of a parameter
CHANNELS, WIDTH = 16, 16  # of the images that are gathered
ROW = 4 * CHANNELS * WIDTH  # bytes of a row of a rank's own
# to every link and sum, all in turn: what is slow for a while is then a part of what is
# known, not all
VISITS = 5
SLOWER = 1.05  # than what the links alone say: what is measured to be less so is noise
OneWay = dict[int, list[float]]  # seconds by bytes
Repeat = tuple[float, ...]  # seconds of all ranks in their order
Start = Callable[[], Callable[[], Any]]  # what is returned waits for the result


def link_models(
    group: RankGroup, device: torch.device, sizes: Sequence[int] = SIZES
) -> dict[str, LinkModel]:
    """Latency and bandwidth of every pair each way, one pair at a time while the other
    ranks wait. Collective.
    """
    call_tags.enter_step("link_models")
    mine: dict[tuple[int, int], OneWay] = {}
    for _, (sender, receiver) in product(
        range(VISITS), permutations(range(group.size), 2)
    ):
        echoes = _echoes(group, sender, receiver, TINY, device)
        for size in sizes:
            seconds = _one_way(_echoes(group, sender, receiver, size, device), echoes)
            if group.rank == sender:
                mine.setdefault((sender, receiver), {}).setdefault(size, []).extend(
                    seconds
                )
    found = {
        pair: one_way
        for known in all_gather_object(group, mine)
        for pair, one_way in known.items()
    }
    return {
        f"{a}-{b}": replace(
            fit.link(found[a, b], found[b, a]), measured=conditions(device)
        )
        for a, b in combinations(range(group.size), 2)
    }


def _one_way(seconds: Sequence[float], echoes: Sequence[float]) -> list[float]:
    """Of messages that a tiny one answered: less what that took, which is half of there
    and back.
    """
    back = median(echoes) / 2
    return [max(s - back, back) for s in seconds]


def _echoes(
    group: RankGroup, sender: int, receiver: int, size: int, device: torch.device
) -> list[float]:
    """Seconds until a message of ``size`` bytes was answered by a tiny one. Every rank
    joins every round.
    """
    message, tiny = (
        torch.zeros(size // 4, device=device),
        torch.zeros(TINY // 4, device=device),
    )

    def there_and_back() -> None:
        for source, target, sent in (
            (sender, receiver, message),
            (receiver, sender, tiny),
        ):
            out = {target: sent} if group.rank == source else {}
            into = {source: tuple(sent.shape)} if group.rank == target else {}
            PendingExchange(group, sent, out, into).wait()

    return [timed(there_and_back, device) for _ in range(_repeats(size))][1:]


def _repeats(size: int) -> int:
    """Of a visit: a number that all ranks know, and one more to warm up."""
    return 9 if size < 1 << 20 else 3


def with_contention(
    profile: ClusterProfile, group: RankGroup, device: torch.device
) -> ClusterProfile:
    """The profile with what only shows when all ranks send at once. Collective.

    What ranks of one host take to copy messages, wires that links share, and what sums take.
    """
    call_tags.enter_step("with_contention")
    if group.size < 2:
        return profile
    copying = _copying(profile.nodes, group, device)
    devices = tuple(
        replace(one, copying=known)
        for one, known in zip(profile.devices, copying, strict=True)
    )
    links_alone = replace(profile, devices=devices, shared=(), sum_s_per_byte=0.0)
    wires = (*_hosts(links_alone, group, device), *_cards(links_alone, group, device))
    measured = replace(
        links_alone,
        shared=tuple(w for w in wires if _matters(w, Network.of(links_alone))),
    )
    everyone = tuple(range(group.size))
    repeats = _at_once(
        group, {size: _sum(group, size, device) for size in SUMS}, device
    )
    sums = {size: _slowest(of_size, everyone) for size, of_size in repeats.items()}
    expected = Network.of(measured).s_per_summed_byte(everyone)
    return replace(measured, sum_s_per_byte=max(fit.line(sums)[1] - expected, 0.0))


def _hosts(
    profile: ClusterProfile, group: RankGroup, device: torch.device
) -> list[SharedWire]:
    """The ranks of every host gather an image of their own, with all the copying that
    the runtime does for it.

    Where ranks do all of it themselves it is known what each of them takes, and there is no wire.
    """
    by_wire = [
        ranks
        for ranks in profile.nodes
        if None in (profile.devices[rank].copying for rank in ranks)
    ]
    if not any(len(ranks) > 1 for ranks in by_wire):
        return []
    starts = {part: _gather(profile.nodes, group, part, device) for part in PARTS}
    times = _at_once(
        group, {part: partial(_done, start) for part, start in starts.items()}, device
    )
    found = []
    for ranks in by_wire:
        if pairs := tuple(permutations(ranks, 2)):
            of_host = {
                part * len(pairs): _slowest(repeats, ranks)
                for part, repeats in times.items()
            }
            name = f"host {_host(profile, ranks)}"
            found.append(
                SharedWire(name, pairs, fit.line(of_host)[1], conditions(device))
            )
    return found


def _done(start: Start) -> Any:
    return start()()


def _copying(
    nodes: Sequence[Sequence[int]], group: RankGroup, device: torch.device
) -> list[Copying | None]:
    """Of every rank; None where a backend carries messages.

    All send at once, and when all have sent, all join what came, or add it. Who shares
    a core takes as many times as long: not for a moment after a pause, in which it goes
    first, but in steps that never rest.
    """
    (own,) = (ranks for ranks in nodes if group.rank in ranks)
    copies = (
        device.type == "cpu"
        and len(own) > 1
        and {*own} - {group.rank} <= shared_memory_channels(group).keys()
    )
    if not any(all_gather_object(group, copies)):
        return [None] * group.size
    others = max(map(len, nodes)) - 1
    parts = [max(size // others // ROW, 1) * ROW for size in COPIES]
    sent, joined, added = ({part: list[float]() for part in parts} for _ in range(3))
    starts = {
        (part, sums): _gather(nodes, group, part, device, sums)
        for sums in (False, True)
        for part in parts
    }
    for _, ((part, sums), start) in product(range(VISITS), starts.items()):
        for repeat in range(_repeats(part)):
            sending, arrived = _timed(group, start, device)
            receiving, _ = _timed(group, arrived, device)
            if repeat > 0:
                sent[part].append(sending)
                (added if sums else joined)[part].append(receiving)
    of_core, n = parts_of_core(group).together, len(own)
    pieces = ((sent, n - 1), (joined, n), (added, n - 1)) if copies else ()
    per_byte = [
        fit.line({part * k: of[part] for part in parts})[1] / of_core
        for of, k in pieces
    ]
    return all_gather_object(group, Copying(*per_byte) if copies else None)


def _timed(
    group: RankGroup, action: Callable[[], T], device: torch.device
) -> tuple[float, T]:
    """For how many seconds this rank is at work for an action that all begin together,
    and what it gave.
    """
    given: list[T] = []
    meet(group)
    seconds = timed(lambda: given.append(action()), device, time.thread_time)
    return seconds, given[0]


def _gather(
    nodes: Sequence[Sequence[int]],
    group: RankGroup,
    part: int,
    device: torch.device,
    sums: bool = False,
) -> Start:
    """Of an image per host, cut by channels as filters leave it, of ``part`` bytes on
    each of its ranks.

    ``sums``: the other way round, whole summands on all of them become parts of their sum.
    """
    images = Box.whole(
        (len(nodes), max(map(len, nodes)) * CHANNELS, part // ROW, WIDTH)
    )
    parts, wholes = [images] * group.size, [images] * group.size
    for n, ranks in enumerate(nodes):
        for k, rank in enumerate(ranks):
            own = images.along(0, n, n + 1)
            parts[rank] = own.along(1, k * CHANNELS, (k + 1) * CHANNELS)
            wholes[rank] = own.along(1, 0, len(ranks) * CHANNELS)
    held, wanted = (
        tuple(boxes) for boxes in ((wholes, parts) if sums else (parts, wholes))
    )
    local = torch.zeros(held[group.rank].shape, device=device).contiguous(
        memory_format=torch.channels_last
    )
    return partial(start_sum, group, local, held, wanted)


def _cards(
    profile: ClusterProfile, group: RankGroup, device: torch.device
) -> list[SharedWire]:
    """Every rank sends to, and receives from, every rank of another host."""
    nodes, found = profile.nodes, []
    if len(nodes) < 2:
        return []
    own = next(ranks for ranks in nodes if group.rank in ranks)
    others = [rank for rank in range(group.size) if rank not in own]

    def exchange(part: int) -> Callable[[], Any]:
        message = torch.zeros(part // 4, device=device)
        return lambda: PendingExchange(
            group,
            message,
            dict.fromkeys(others, message),
            dict.fromkeys(others, (part // 4,)),
        ).wait()

    times = _at_once(group, {part: exchange(part) for part in PARTS}, device)
    for ranks in nodes:
        out = tuple((a, b) for a in ranks for b in range(group.size) if b not in ranks)
        of_card = {
            part * len(out): _slowest(repeats, ranks) for part, repeats in times.items()
        }
        for way, pairs in (("out", out), ("in", tuple((b, a) for a, b in out))):
            name = f"card of {_host(profile, ranks)}, {way}"
            found.append(
                SharedWire(name, pairs, fit.line(of_card)[1], conditions(device))
            )
    return found


def _sum(group: RankGroup, size: int, device: torch.device) -> Callable[[], Any]:
    """Of the gradients of a parameter, as at the end of a step."""
    weight = torch.zeros((size // ROW, CHANNELS, 1, WIDTH), device=device)
    parameter = weight.contiguous(memory_format=torch.channels_last).requires_grad_()
    gradient = torch.ones_like(parameter)

    def summed() -> Any:
        scope = GradientSync(group, [parameter], {}, {id(parameter)})
        return torch.autograd.grad(scope.alias(parameter), parameter, gradient)

    return summed


def _matters(wire: SharedWire, links_alone: Network) -> bool:
    """Whether its pairs, all at once, are slower than each alone would let them be."""
    sent = np.zeros_like(links_alone.s_per_byte)
    for pair in wire.pairs:
        sent[pair] = PARTS[-1]
    return wire.s_per_byte * float(sent.sum()) > SLOWER * float(
        links_alone.seconds(sent)
    )


def _at_once(
    group: RankGroup, actions: Mapping[int, Callable[[], Any]], device: torch.device
) -> dict[int, list[Repeat]]:
    """Of the action of so many bytes every repeat, which all ranks begin together."""
    mine: dict[int, list[float]] = {size: [] for size in actions}
    for _, (size, action) in product(range(VISITS), actions.items()):
        for repeat in range(_repeats(size)):
            meet(group)
            seconds = timed(action, device)
            if repeat > 0:
                mine[size].append(seconds)
    of_all = all_gather_object(group, mine)
    return {
        size: [*zip(*(of_rank[size] for of_rank in of_all), strict=True)]
        for size in actions
    }


def _slowest(repeats: Sequence[Repeat], ranks: Sequence[int]) -> list[float]:
    return [max(seconds[rank] for rank in ranks) for seconds in repeats]


def _host(profile: ClusterProfile, ranks: Sequence[int]) -> str:
    identity = profile.devices[ranks[0]].identity
    return (
        identity.host
        if identity is not None
        else str(profile.nodes.index(tuple(ranks)))
    )
