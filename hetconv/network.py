"""How long messages between ranks take: a profile's links as arrays, for many rounds of exchange at once. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .holding import Ranks, summed_among
from .layout import Boxes, Exchange
from .profile import ClusterProfile, DeviceModel

Array = npt.NDArray[np.float64]
SUMMED_BYTES = 4 << 20  # of a large sum
Wire = tuple[tuple[tuple[int, int], ...], float]  # the (sender, receiver) pairs that share it, seconds per byte


class Messages(NamedTuple):
    """One round: (P, P) bytes from sender to receiver, which pairs that are, and (P,) seconds that each rank takes."""

    sent_bytes: Array
    pairs: npt.NDArray[np.bool_]
    seconds: Array


@dataclass(frozen=True, eq=False)
class Network:
    """``latency_s`` and ``s_per_byte``: (P, P), from sender to receiver, 0 from a rank to itself.

    ``shared``: wires that several pairs use at once, such as a host's uplink; one for each direction if it is duplex.
    ``overlap`` and ``sum_s_per_byte``: as `ClusterProfile` has them. ``adding``: (P,) seconds that each rank takes for
    a byte that it adds to what it has.
    """

    latency_s: Array
    s_per_byte: Array
    shared: tuple[Wire, ...] = ()
    overlap: float = 1.0
    sum_s_per_byte: float = 0.0
    adding: Array | float = 0.0
    _known: dict[tuple[Exchange, int], Messages] = field(default_factory=dict)
    _same: dict[tuple[int, int], tuple[Exchange, Messages]] = field(default_factory=dict)
    _per_byte: dict[Ranks, float] = field(default_factory=dict)

    @classmethod
    def of(cls, profile: ClusterProfile) -> Network:
        latency_s, s_per_byte = np.zeros((2, profile.world, profile.world))
        for a, b in permutations(range(profile.world), 2):
            link = profile.link(a, b)
            latency_s[a, b] = link.latency_s * profile.latency_at_work
            s_per_byte[a, b] = link.s_per_byte * profile.bytes_at_work
        shared = tuple((wire.pairs, wire.s_per_byte * profile.bytes_at_work) for wire in profile.shared)
        adding = np.array([_adding(device) for device in profile.devices])
        return cls(latency_s, s_per_byte, shared, profile.overlap, profile.sum_s_per_byte, adding)

    @property
    def world(self) -> int:
        return len(self.latency_s)

    def spent(self, sent_bytes: Array, added_bytes: Array | float = 0.0) -> Array:
        """(..., P, P), sender by receiver -> (..., P): seconds in which each rank sends and receives all of one round.

        A rank sends one message after the other and receives meanwhile. No bytes are no message and cost no latency.
        (..., P) ``added_bytes`` of what it has then are added to others.
        """
        messages = (sent_bytes > 0) * self.latency_s + sent_bytes * self.s_per_byte
        longer: Array = np.maximum(messages.sum(-1), messages.sum(-2)) + added_bytes * self.adding
        return longer

    def seconds(self, sent_bytes: Array, added_bytes: Array | float = 0.0) -> Array:
        """(..., P, P) -> (...): how long one round takes: what the slowest rank or the busiest shared wire does."""
        slowest: Array = self.spent(sent_bytes, added_bytes).max(-1)
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

    def messages(self, one: Exchange, itemsize: int) -> Messages:
        """Of one round, remembered. Ranks whose messages share a wire are done when that has carried all of them."""
        key = id(one), itemsize  # equal ones are long to compare
        if key not in self._same:
            if (one, itemsize) not in self._known:
                self._known[one, itemsize] = self._messages(one, itemsize)
            self._same[key] = one, self._known[one, itemsize]  # the round is kept, so that its id stays what it is
        return self._same[key][1]

    def _messages(self, one: Exchange, itemsize: int) -> Messages:
        held, wanted = one
        common = _common(held, wanted) * float(itemsize)
        wanted_bytes = np.array([box.numel * itemsize for box in wanted])
        sent = common * (1.0 - np.eye(self.world))
        pairs = sent > 0
        seconds = self.spent(sent, added(common, wanted_bytes))
        for wire, load in zip(self.shared, sent.reshape(-1) @ self._loads, strict=True) if self.shared else ():
            users = [rank for pair in wire[0] if pairs[pair] for rank in pair]
            seconds[users] = np.maximum(seconds[users], load)
        return Messages(sent, pairs, seconds)

    def rounds_s(self, rounds: tuple[Exchange, ...], itemsize: int) -> float:
        """Seconds of rounds one after the other, each as long as its slowest rank takes."""
        return sum(float(self.messages(one, itemsize).seconds.max(initial=0.0)) for one in rounds)

    def s_per_summed_byte(self, holders: Ranks) -> float:
        """Seconds for a byte of a large sum among some ranks, as those of parameters' gradients are; remembered."""
        if holders not in self._per_byte:
            moving = self.rounds_s(summed_among(holders, SUMMED_BYTES // 4, self.world), 4)
            self._per_byte[holders] = moving / SUMMED_BYTES + (self.sum_s_per_byte if len(holders) > 1 else 0.0)
        return self._per_byte[holders]

    def summing(self, sums: Iterable[tuple[tuple[Exchange, ...], int]]) -> Array:
        """(P,) seconds that each rank takes for sums of gradients beside their messages."""
        held = [[box.numel * itemsize for box in rounds[0][0]] for rounds, itemsize in sums if rounds]
        total: Array = np.array(held, dtype=np.float64).reshape(-1, self.world).sum(0)
        return total * self.sum_s_per_byte


def added(common: Array, wanted: Array) -> Array:
    """(..., P, P), (..., P) -> (..., P): what each receiver adds, of all that senders, itself among them, have of it.

    What several have is summed: beyond the first summand of each element, all are added.
    """
    more: Array = np.maximum(common.sum(-2) - wanted, 0.0)
    return more


def _adding(device: DeviceModel) -> float:
    """Of two that are read and one that is written; nothing where that was not measured, as data sheets say nothing."""
    model = device.others.get("elementwise float32")
    return model.forward.at(3.0 * SUMMED_BYTES) / SUMMED_BYTES if model is not None else 0.0


def _common(held: Boxes, wanted: Boxes) -> Array:
    """(P, P): elements that each rank's held box and each rank's wanted one have in common, as `layout.pieces` does."""
    common = np.ones((len(held), len(wanted)))
    corners = (np.array([(b.lo, b.hi) for b in boxes], dtype=np.float64).transpose(2, 1, 0) for boxes in (held, wanted))
    for ends in zip(*corners, strict=True):
        (lo, hi), (start, end) = ends
        common = common * np.maximum(np.minimum(hi[:, None], end) - np.maximum(lo[:, None], start), 0)
    return common


def both(computing: float, moving: float, overlap: float) -> float:
    """Seconds of both, where this part of the shorter one takes no time of its own."""
    return max(computing, moving) + (1 - overlap) * min(computing, moving)
