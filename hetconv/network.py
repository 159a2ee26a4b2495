"""How long messages between ranks take: a profile's links as arrays, for many rounds of exchange at once. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .layout import Exchange, summed, traffic
from .profile import ClusterProfile

Array = npt.NDArray[np.float64]
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
    """

    latency_s: Array
    s_per_byte: Array
    shared: tuple[Wire, ...] = ()
    _known: dict[tuple[Exchange, int], Messages] = field(default_factory=dict)

    @classmethod
    def of(cls, profile: ClusterProfile) -> Network:
        latency_s, s_per_byte = np.zeros((2, profile.world, profile.world))
        for a, b in zip(*np.triu_indices(profile.world, 1), strict=True):
            link = profile.link(int(a), int(b))
            latency_s[[a, b], [b, a]], s_per_byte[[a, b], [b, a]] = link.latency_s, link.s_per_byte
        return cls(latency_s, s_per_byte, tuple((wire.pairs, wire.s_per_byte) for wire in profile.shared))

    @property
    def world(self) -> int:
        return len(self.latency_s)

    def spent(self, sent_bytes: Array) -> Array:
        """(..., P, P), sender by receiver -> (..., P): seconds in which each rank sends and receives all of one round.

        A rank sends one message after the other and receives meanwhile. No bytes are no message and cost no latency.
        """
        messages = (sent_bytes > 0) * self.latency_s + sent_bytes * self.s_per_byte
        longer: Array = np.maximum(messages.sum(-1), messages.sum(-2))
        return longer

    def seconds(self, sent_bytes: Array) -> Array:
        """(..., P, P) -> (...): how long one round takes: what the slowest rank or the busiest shared wire does."""
        slowest: Array = self.spent(sent_bytes).max(-1)
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
        if (one, itemsize) not in self._known:
            sent = np.zeros((self.world, self.world))
            for pair, size in traffic((one,), itemsize).items():
                sent[pair] = size
            pairs = sent > 0
            seconds = self.spent(sent)
            for wire, load in zip(self.shared, sent.reshape(-1) @ self._loads, strict=True) if self.shared else ():
                users = [rank for pair in wire[0] if pairs[pair] for rank in pair]
                seconds[users] = np.maximum(seconds[users], load)
            self._known[one, itemsize] = Messages(sent, pairs, seconds)
        return self._known[one, itemsize]

    def rounds_s(self, rounds: tuple[Exchange, ...], itemsize: int) -> float:
        """Seconds of rounds one after the other, each as long as its slowest rank takes."""
        return sum(float(self.messages(one, itemsize).seconds.max(initial=0.0)) for one in rounds)

    @cached_property
    def s_per_summed_byte(self) -> float:
        """Seconds for a byte of a large sum over all ranks, as those of parameters' gradients are."""
        numel = 1 << 20
        return self.rounds_s(summed((numel,), self.world).forward, 4) / (4 * numel)
