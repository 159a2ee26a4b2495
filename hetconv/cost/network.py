"""Seconds of messages between ranks, for many exchanges at once.

The links of a profile are arrays, (P, P) from sender to receiver.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import DeviceModel
from hetconv.sharding.layout import Boxes
from hetconv.sharding.moves import Exchange
from hetconv.sharding.param_shards import Ranks, all_reduce_among

Array = npt.NDArray[np.float64]
SUMMED_BYTES = 4 << 20  # of a large sum
Wire = tuple[
    tuple[tuple[int, int], ...], float
]  # the (sender, receiver) pairs that share it, seconds per byte


class Messages(NamedTuple):
    """One round: (P, P) bytes from sender to receiver, and which pairs that are.

    (P,) seconds: for ``sending`` each rank puts its messages where receivers find them;
    from when that is done, for what it sends and for all that it gets, it takes
    ``receiving``.
    """

    sent_bytes: Array
    pairs: npt.NDArray[np.bool_]
    sending: Array
    receiving: Array

    @property
    def together(self) -> Array:
        """(P,) seconds of ranks that begin the round together."""
        return _there(self.sending, self.pairs) + self.receiving


@dataclass(frozen=True, eq=False)
class Network:
    """``latency_s`` and ``s_per_byte``: (P, P), from sender to receiver, 0 from a rank to itself.

    ``shared``: wires that several pairs use at once, such as a host's uplink; one for
    each direction if it is duplex. ``overlap`` and ``sum_s_per_byte``: as
    `ClusterProfile` has them. ``adding``: (P,) seconds that each rank takes for a byte
    that it adds to what it has. ``by_memory``: (P, P), which pairs have no wire; (P,)
    ``sends`` and ``joins`` are then as `Copying` has them.
    """

    latency_s: Array
    s_per_byte: Array
    shared: tuple[Wire, ...] = ()
    overlap: float = 1.0
    sum_s_per_byte: float = 0.0
    adding: Array | float = 0.0
    by_memory: npt.NDArray[np.bool_] | bool = False
    sends: Array | float = 0.0
    joins: Array | float = 0.0
    _known: dict[tuple[Exchange, int, bool], Messages] = field(default_factory=dict)
    _same: dict[tuple[int, int, bool], tuple[Exchange, Messages]] = field(
        default_factory=dict
    )
    _per_byte: dict[Ranks, float] = field(default_factory=dict)

    @classmethod
    def of(cls, profile: ClusterProfile) -> Network:
        """Makes the network of a profile."""
        latency_s, s_per_byte = np.zeros((2, profile.world, profile.world))
        for a, b in permutations(range(profile.world), 2):
            link = profile.link(a, b)
            latency_s[a, b] = link.latency_s * profile.latency_at_work
            s_per_byte[a, b] = link.s_per_byte * profile.bytes_at_work
        shared = tuple(
            (wire.pairs, wire.s_per_byte * profile.bytes_at_work)
            for wire in profile.shared
        )
        copying = [device.copying for device in profile.devices]
        own = (
            np.array(
                [(c.sends, c.joins, c.adds) if c else (0.0, 0.0, 0.0) for c in copying]
            )
            * profile.bytes_at_work
        )
        by_memory = np.zeros((profile.world, profile.world), dtype=bool)
        for ranks in profile.nodes:
            copies = [rank for rank in ranks if copying[rank] is not None]
            by_memory[np.ix_(copies, copies)] = True
        sends, joins, adds = own.T
        adding = np.where(
            adds > 0, adds, [_adding(device) for device in profile.devices]
        )
        return cls(
            latency_s,
            s_per_byte,
            shared,
            profile.overlap,
            profile.sum_s_per_byte,
            adding,
            by_memory,
            sends,
            joins,
        )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.latency_s)

    def spent(
        self,
        sent_bytes: Array,
        added_bytes: Array | float = 0.0,
        joined_bytes: Array | float = 0.0,
    ) -> Array:
        """Returns the seconds in which each rank sends and receives all of an exchange.

        Ranks begin together. A rank sends one message after the other; over wires it receives
        meanwhile, through memory afterwards. No bytes are no message and have no latency.

        Args:
            sent_bytes: (..., P, P), from sender to receiver.
            added_bytes: (..., P) that each rank adds to others.
            joined_bytes: (..., P) that each rank assembles from messages and its own part.

        Returns:
            (..., P) seconds.
        """
        sending, receiving = self._sides(sent_bytes, added_bytes, joined_bytes)
        return _there(sending, sent_bytes > 0) + receiving

    def _sides(
        self, sent_bytes: Array, added_bytes: Array | float, joined_bytes: Array | float
    ) -> tuple[Array, Array]:
        """Returns (..., P) seconds before and after messages are where receivers find them."""
        pairs, added = sent_bytes > 0, added_bytes * self.adding
        by_wire = (pairs * self.latency_s + sent_bytes * self.s_per_byte) * ~np.asarray(
            self.by_memory
        )
        carried: Array = np.maximum(by_wire.sum(-1), by_wire.sum(-2))
        if not np.any(self.by_memory):
            return np.zeros_like(carried), carried + added
        by_memory = pairs & self.by_memory
        half = by_memory * self.latency_s / 2
        sending = half.sum(-1) + (sent_bytes * by_memory).sum(-1) * self.sends
        joined = np.where(added > 0, 0.0, by_memory.any(-2) * joined_bytes * self.joins)
        return sending, carried + half.sum(-2) + joined + added

    def seconds(
        self,
        sent_bytes: Array,
        added_bytes: Array | float = 0.0,
        joined_bytes: Array | float = 0.0,
    ) -> Array:
        """Returns the seconds of an exchange: of the slowest rank or the busiest shared wire.

        Args:
            sent_bytes: (..., P, P), from sender to receiver.
            added_bytes: see `spent`.
            joined_bytes: see `spent`.
        """
        slowest: Array = self.spent(sent_bytes, added_bytes, joined_bytes).max(-1)
        if self.shared:
            flat = sent_bytes.reshape(*sent_bytes.shape[:-2], -1)
            slowest = np.maximum(slowest, (flat @ self._loads).max(-1))
        return slowest

    @cached_property
    def _loads(self) -> Array:
        """(P * P, wires): seconds for which a byte between a pair occupies each shared wire."""
        loads = np.zeros((self.world, self.world, len(self.shared)))
        for wire, (pairs, s_per_byte) in enumerate(self.shared):
            for sender, receiver in pairs:
                loads[sender, receiver, wire] = s_per_byte
        return loads.reshape(-1, len(self.shared))

    def messages(
        self, one: Exchange, itemsize: int, separate: bool = False
    ) -> Messages:
        """Returns the messages of an exchange, from a cache.

        Ranks whose messages share a wire are done when it has carried all of them.

        Args:
            one: the exchange.
            itemsize: bytes of an element.
            separate: whether what arrives stays separate from a rank's own part, as halos do.
        """
        key = id(one), itemsize, separate  # equal ones are long to compare
        if key not in self._same:
            if (one, itemsize, separate) not in self._known:
                self._known[one, itemsize, separate] = self._messages(
                    one, itemsize, separate
                )
            self._same[key] = (
                one,
                self._known[one, itemsize, separate],
            )  # the round is kept, so that its id stays
        return self._same[key][1]

    def _messages(self, one: Exchange, itemsize: int, separate: bool) -> Messages:
        held, wanted = one
        common = _common(held, wanted) * float(itemsize)
        wanted_bytes = np.array([box.numel * itemsize for box in wanted])
        sent = common * (1.0 - np.eye(self.world))
        pairs = sent > 0
        sending, receiving = self._sides(
            sent,
            elements_to_add(common, wanted_bytes),
            sent.sum(0) if separate else wanted_bytes,
        )
        for wire, load in (
            zip(self.shared, sent.reshape(-1) @ self._loads, strict=True)
            if self.shared
            else ()
        ):
            users = [rank for pair in wire[0] if pairs[pair] for rank in pair]
            receiving[users] = np.maximum(receiving[users], load)
        return Messages(sent, pairs, sending, receiving)

    def rounds_s(
        self, rounds: tuple[Exchange, ...], itemsize: int, separate: bool = False
    ) -> float:
        """Seconds of rounds one after the other, each as long as its slowest rank takes."""
        return sum(
            float(self.messages(one, itemsize, separate).together.max(initial=0.0))
            for one in rounds
        )

    def s_per_summed_byte(self, holders: Ranks) -> float:
        """Returns the seconds for a byte of a large sum among some ranks, from a cache."""
        if holders not in self._per_byte:
            moving = self.rounds_s(
                all_reduce_among(holders, SUMMED_BYTES // 4, self.world), 4
            )
            self._per_byte[holders] = moving / SUMMED_BYTES + (
                self.sum_s_per_byte if len(holders) > 1 else 0.0
            )
        return self._per_byte[holders]

    def summing(self, sums: Iterable[tuple[tuple[Exchange, ...], int]]) -> Array:
        """(P,) seconds that each rank takes for sums of gradients beside their messages."""
        held = [
            [box.numel * itemsize for box in rounds[0][0]]
            for rounds, itemsize in sums
            if rounds
        ]
        total: Array = np.array(held, dtype=np.float64).reshape(-1, self.world).sum(0)
        return total * self.sum_s_per_byte


def elements_to_add(common: Array, wanted: Array) -> Array:
    """Returns how many elements each receiver adds.

    Args:
        common: (..., P, P) elements that each sender has for each receiver.
        wanted: (..., P) elements of each receiver.

    Returns:
        (..., P): all elements beyond the first summand of each.
    """
    more: Array = np.maximum(common.sum(-2) - wanted, 0.0)
    return more


def _there(sending: Array, pairs: npt.NDArray[np.bool_]) -> Array:
    """Returns (..., P): when all messages of each rank are where they are to be found."""
    there: Array = np.maximum(sending, np.where(pairs, sending[..., None], 0.0).max(-2))
    return there


def _adding(device: DeviceModel) -> float:
    """Returns seconds per added byte: two are read and one is written; 0 if not measured."""
    model = device.others.get("elementwise float32")
    return (
        model.forward.at(3.0 * SUMMED_BYTES) / SUMMED_BYTES
        if model is not None
        else 0.0
    )


def _common(held: Boxes, wanted: Boxes) -> Array:
    """Returns (P, P): elements that held and wanted boxes have in common."""
    common = np.ones((len(held), len(wanted)))
    corners = (
        np.array([(b.lo, b.hi) for b in boxes], dtype=np.float64).transpose(2, 1, 0)
        for boxes in (held, wanted)
    )
    for ends in zip(*corners, strict=True):
        (lo, hi), (start, end) = ends
        common = common * np.maximum(
            np.minimum(hi[:, None], end) - np.maximum(lo[:, None], start), 0
        )
    return common


def overlapped_s(computing: float, moving: float, overlap: float) -> float:
    """Seconds of both, where this part of the shorter one takes no time of its own."""
    return max(computing, moving) + (1 - overlap) * min(computing, moving)
