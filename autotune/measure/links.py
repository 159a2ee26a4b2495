"""How fast messages travel: on every link alone, each way, and when all ranks send at once."""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations, product
from math import inf
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch

from hetconv.comm import call_tags
from hetconv.comm.exchange import PendingExchange
from hetconv.comm.rank_group import RankGroup, all_gather_object, shared_memory_channels
from hetconv.comm.redistribute import start_sum
from hetconv.cost.network import Array, Network
from hetconv.runtime.gradient_sync import GradientSync
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import Copying, LinkModel, SharedWire
from hetconv.sharding.layout import Box

from . import fit
from .barrier import tight_barrier
from .cpu_share import core_share
from .device_info import conditions
from .timer import timed

T = TypeVar("T")
ANSWER_BYTES = 4
LINK_BYTES = tuple(1 << n for n in (10, 13, 16, 19, 22, 26))
# That a rank sends: small messages lie in caches, large ones do not.
COPY_BYTES = tuple(1 << n for n in (18, 20, 22, 24))
EXCHANGE_BYTES = tuple(1 << n for n in (16, 19, 22))  # to each other rank
PROBE_BYTES = 1 << 16
SUM_BYTES = tuple(1 << n for n in (18, 20, 23))  # of a parameter
CHANNELS = WIDTH = 16  # of the images that are gathered
ROW_BYTES = 4 * CHANNELS * WIDTH  # of what one rank has of them
# To every link and sum, in turn: what is slow for a while is then a part of what is
# known, not all.
VISITS = 5
MIN_SLOWDOWN = 1.05  # by contention; what is measured to be less is noise
Start = Callable[[], Callable[[], Any]]  # what is returned waits for the result


def link_models(
    group: RankGroup,
    device: torch.device,
    sizes: Sequence[int] = LINK_BYTES,
    *,
    allowed_s: float = inf,
    after_visit: Callable[[], None] = lambda: None,
) -> dict[str, LinkModel]:
    """Measures every pair of ranks each way, while the other ranks wait. Collective.

    Args:
        group: all ranks.
        device: the device of this rank.
        sizes: of the messages, in bytes.
        allowed_s: seconds that this may take, about; of slow links, smaller messages
            alone are measured. The same on all ranks.
        after_visit: called, on every rank, when all links have been visited once more.

    Returns:
        Latency and bandwidth by "low-high" ranks.
    """
    call_tags.enter_step("link_models")
    pairs = tuple(permutations(range(group.size), 2))
    probes = [_round_trips(group, *pair, PROBE_BYTES, device) for pair in pairs]
    slowest_s = max((median(seconds) for seconds in probes), default=0.0)
    s_per_byte = max(all_gather_object(group, slowest_s)) / PROBE_BYTES
    sizes = _affordable(sizes, len(pairs) * s_per_byte, allowed_s)
    own: dict[tuple[int, int], dict[int, list[float]]] = {
        pair: {size: [] for size in sizes} for pair in pairs if pair[0] == group.rank
    }
    for _, pair in product(range(VISITS), pairs):
        answers = _round_trips(group, *pair, ANSWER_BYTES, device)
        for size in sizes:
            seconds = _one_way(_round_trips(group, *pair, size, device), answers)
            if pair in own:
                own[pair][size] += seconds
        if pair == pairs[-1]:
            after_visit()
    found = ChainMap(*all_gather_object(group, own))
    measured = conditions(device)
    return {
        f"{a}-{b}": replace(fit.link(found[a, b], found[b, a]), measured=measured)
        for a, b in combinations(range(group.size), 2)
    }


def _affordable(
    sizes: Sequence[int], s_per_byte: float, allowed_s: float
) -> tuple[int, ...]:
    """Returns the sizes whose visits take half of the time, and the two smallest anyhow."""

    def visits_s(size: int) -> float:
        return VISITS * _repeats(size) * size * s_per_byte

    fitting = [size for size in sizes if visits_s(size) <= allowed_s / 2]
    return tuple(sizes[: max(len(fitting), 2)])


def _one_way(round_trips: Sequence[float], answers: Sequence[float]) -> list[float]:
    """Returns seconds of messages, less half of a round trip as small as the answer."""
    answer_s = median(answers) / 2
    return [max(seconds - answer_s, answer_s) for seconds in round_trips]


def _round_trips(
    group: RankGroup, sender: int, receiver: int, size: int, device: torch.device
) -> list[float]:
    """Seconds until a message of ``size`` bytes was answered; every rank joins."""
    message = torch.zeros(size // 4, device=device)
    answer = torch.zeros(ANSWER_BYTES // 4, device=device)

    def send(source: int, target: int, sent: torch.Tensor) -> None:
        out = {target: sent} if group.rank == source else {}
        into = {source: tuple(sent.shape)} if group.rank == target else {}
        PendingExchange(group, sent, out, into).wait()

    def there_and_back() -> None:
        send(sender, receiver, message)
        send(receiver, sender, answer)

    return [timed(there_and_back, device) for _ in range(_repeats(size))][1:]


def _repeats(size: int) -> int:
    """How often a message is sent in a visit: alike on all ranks, and once to warm up."""
    return 9 if size < 1 << 20 else 3


def with_contention(
    profile: ClusterProfile,
    group: RankGroup,
    device: torch.device,
    allowed_s: float = inf,
) -> ClusterProfile:
    """Adds what only shows when all ranks send at once. Collective.

    These are the seconds that ranks of one host take to copy messages, wires that links
    share, and what sums of gradients take beside their messages.

    Args:
        profile: with the links alone.
        group: all ranks.
        device: the device of this rank.
        allowed_s: as for `link_models`.
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
    pairs = tuple(permutations(range(group.size), 2))
    # As slow as where all pairs share one wire.
    together = sum(profile.link(*pair).s_per_byte for pair in pairs)
    exchanged = _affordable(EXCHANGE_BYTES, together, allowed_s)
    wires = (
        *_hosts(links_alone, group, device, exchanged),
        *_cards(links_alone, group, device, exchanged),
    )
    network = Network.of(links_alone)
    shared = tuple(wire for wire in wires if _is_slower(wire, network))
    measured = replace(links_alone, shared=shared)
    ranks = tuple(range(group.size))
    summed = _affordable(SUM_BYTES, together, allowed_s)
    sums = {size: _sum(group, size, device) for size in summed}
    s_per_byte = _s_per_byte(_time_all(group, sums, device), ranks)
    expected = Network.of(measured).s_per_summed_byte(ranks)
    return replace(measured, sum_s_per_byte=max(s_per_byte - expected, 0.0))


def _hosts(
    profile: ClusterProfile,
    group: RankGroup,
    device: torch.device,
    sizes: Sequence[int],
) -> list[SharedWire]:
    """Measures how the ranks of every host gather an image, with all copies.

    There is no shared wire where the ranks copy by themselves.
    """
    nodes = [
        ranks
        for ranks in profile.nodes
        if len(ranks) > 1 and any(profile.devices[r].copying is None for r in ranks)
    ]
    if not nodes:
        return []
    starts = {size: _gather(profile.nodes, group, size, device) for size in sizes}
    gathers = {size: partial(_finish, start) for size, start in starts.items()}
    times = _time_all(group, gathers, device)
    return [
        _wire(
            f"host {_host(profile, ranks)}",
            permutations(ranks, 2),
            times,
            ranks,
            device,
        )
        for ranks in nodes
    ]


def _finish(start: Start) -> Any:
    return start()()


def _cards(
    profile: ClusterProfile,
    group: RankGroup,
    device: torch.device,
    sizes: Sequence[int],
) -> list[SharedWire]:
    """Every rank sends to, and receives from, every rank of another host."""
    if len(profile.nodes) < 2:
        return []
    own = next(ranks for ranks in profile.nodes if group.rank in ranks)
    others = [rank for rank in range(group.size) if rank not in own]

    def exchange(message: torch.Tensor) -> None:
        sent = dict.fromkeys(others, message)
        PendingExchange(
            group, message, sent, dict.fromkeys(others, tuple(message.shape))
        ).wait()

    messages = {size: torch.zeros(size // 4, device=device) for size in sizes}
    exchanges = {size: partial(exchange, x) for size, x in messages.items()}
    times = _time_all(group, exchanges, device)
    found = []
    for ranks in profile.nodes:
        peers = [rank for rank in range(group.size) if rank not in ranks]
        card = f"card of {_host(profile, ranks)}"
        found += [
            _wire(f"{card}, out", product(ranks, peers), times, ranks, device),
            _wire(f"{card}, in", product(peers, ranks), times, ranks, device),
        ]
    return found


def _wire(
    name: str,
    pairs: Iterable[tuple[int, int]],
    times: Mapping[int, Array],
    ranks: Sequence[int],
    device: torch.device,
) -> SharedWire:
    """``times``: by the bytes that each pair sends; ``ranks``: those that wait for all."""
    sent = tuple(pairs)
    by_total = {size * len(sent): seconds for size, seconds in times.items()}
    return SharedWire(name, sent, _s_per_byte(by_total, ranks), conditions(device))


def _s_per_byte(times: Mapping[int, Array], ranks: Sequence[int]) -> float:
    """By the slowest of these ranks in each repeat."""
    slowest = {size: seconds[:, ranks].max(axis=1) for size, seconds in times.items()}
    return fit.line({size: seconds.tolist() for size, seconds in slowest.items()})[1]


def _copying(
    nodes: Sequence[Sequence[int]], group: RankGroup, device: torch.device
) -> list[Copying | None]:
    """By rank; None where a backend carries messages.

    All send at once, and when all have sent, all join what came, or add it. Who shares
    a core takes as many times as long: not for a moment after a pause, in which it goes
    first, but in steps that never rest.
    """
    own = next(ranks for ranks in nodes if group.rank in ranks)
    peers = {*own} - {group.rank}
    copies = (
        device.type == "cpu"
        and bool(peers)
        and peers <= shared_memory_channels(group).keys()
    )
    if not any(all_gather_object(group, copies)):
        return [None] * group.size
    others = max(map(len, nodes)) - 1
    sizes = [max(size // others // ROW_BYTES, 1) * ROW_BYTES for size in COPY_BYTES]
    starts = {
        (size, sums): _gather(nodes, group, size, device, sums)
        for sums in (False, True)
        for size in sizes
    }
    sends, joins, adds = ({size: list[float]() for size in sizes} for _ in range(3))
    for _, ((size, sums), start) in product(range(VISITS), starts.items()):
        for repeat in range(_repeats(size)):
            sending_s, arrived = _time_own(group, start, device)
            receiving_s, _ = _time_own(group, arrived, device)
            if repeat > 0:
                sends[size].append(sending_s)
                (adds if sums else joins)[size].append(receiving_s)
    share = core_share(group)

    def s_per_byte(seconds: Mapping[int, Sequence[float]], parts: int) -> float:
        return fit.line({size * parts: s for size, s in seconds.items()})[1] / share

    known = None
    if copies:
        known = Copying(
            sends=s_per_byte(sends, len(peers)),
            joins=s_per_byte(joins, len(own)),
            adds=s_per_byte(adds, len(peers)),
        )
    return all_gather_object(group, known)


def _time_own(
    group: RankGroup, action: Callable[[], T], device: torch.device
) -> tuple[float, T]:
    """Returns this rank's seconds of work for an action that all begin together."""
    returned: list[T] = []
    tight_barrier(group)
    seconds = timed(lambda: returned.append(action()), device, time.thread_time)
    return seconds, returned[0]


def _gather(
    nodes: Sequence[Sequence[int]],
    group: RankGroup,
    size: int,
    device: torch.device,
    sums: bool = False,
) -> Start:
    """Gathers an image per host whose channels are sharded.

    Args:
        nodes: ranks of each host.
        group: the ranks.
        size: bytes of each rank.
        device: of this rank.
        sums: whether to sum whole images to shards instead.
    """
    height = size // ROW_BYTES
    images = Box.whole((len(nodes), max(map(len, nodes)) * CHANNELS, height, WIDTH))
    parts, wholes = [images] * group.size, [images] * group.size
    for n, ranks in enumerate(nodes):
        image = images.with_range(0, n, n + 1)
        for k, rank in enumerate(ranks):
            parts[rank] = image.with_range(1, k * CHANNELS, (k + 1) * CHANNELS)
            wholes[rank] = image.with_range(1, 0, len(ranks) * CHANNELS)
    held, wanted = (wholes, parts) if sums else (parts, wholes)
    local = torch.zeros(held[group.rank].shape, device=device)
    local = local.contiguous(memory_format=torch.channels_last)
    return partial(start_sum, group, local, tuple(held), tuple(wanted))


def _sum(group: RankGroup, size: int, device: torch.device) -> Callable[[], Any]:
    """Sums the gradients of a parameter, as at the end of a step."""
    weight = torch.zeros((size // ROW_BYTES, CHANNELS, 1, WIDTH), device=device)
    parameter = weight.contiguous(memory_format=torch.channels_last).requires_grad_()
    gradient = torch.ones_like(parameter)

    def summed() -> Any:
        scope = GradientSync(group, [parameter], {}, {id(parameter)})
        return torch.autograd.grad(scope.alias(parameter), parameter, gradient)

    return summed


def _is_slower(wire: SharedWire, links_alone: Network) -> bool:
    """Whether its pairs, all at once, are slower than each alone would let them be."""
    sent = np.zeros_like(links_alone.s_per_byte)
    for pair in wire.pairs:
        sent[pair] = EXCHANGE_BYTES[-1]
    alone_s = float(links_alone.seconds(sent))
    return wire.s_per_byte * float(sent.sum()) > MIN_SLOWDOWN * alone_s


def _time_all(
    group: RankGroup, actions: Mapping[int, Callable[[], Any]], device: torch.device
) -> dict[int, Array]:
    """Times actions that all ranks begin together: seconds by (repeat, rank)."""
    own: dict[int, list[float]] = {size: [] for size in actions}
    for _, (size, action) in product(range(VISITS), actions.items()):
        for repeat in range(_repeats(size)):
            tight_barrier(group)
            seconds = timed(action, device)
            if repeat > 0:
                own[size].append(seconds)
    of_ranks = all_gather_object(group, own)
    return {size: np.array([one[size] for one in of_ranks]).T for size in actions}


def _host(profile: ClusterProfile, ranks: Sequence[int]) -> str:
    identity = profile.devices[ranks[0]].identity
    if identity is not None:
        return identity.host
    return str(profile.nodes.index(tuple(ranks)))
