"""What a plan's step looks like in time: when each device computes, sends and receives, and waits. Pure.

Devices go on by themselves and wait only for the messages that they need, so a step takes at most, and often less than,
the sum of what every operator takes alone, which the planner minimizes (``summed_s`` of `plan.Prediction`). Sums of
gradients alone may take longer than they count there, where they cost no latency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from .network import Array, Network
from .walk import Applied, Transfers

Thread = Literal["compute", "transfer"]


class Event(NamedTuple):
    """What a device did for an operator, or for its gradient, from ``start_s`` to ``end_s`` of the step.

    The two threads of a device go on at the same time only where halos travel while it computes. ``waits``: the one
    that transfers for a sender that is not there yet, the one that computes for halos that have not all arrived.
    """

    device: int
    thread: Thread
    name: str
    backward: bool
    waits: bool
    start_s: float
    end_s: float


Listener = Callable[[Event], None]


class Clocks:
    """(P,) seconds: when each device is done, from the start of the step; for how long it has computed, or only moved.

    What is left it has waited.
    """

    def __init__(self, network: Network, listener: Listener | None = None):
        self.network, self.listener = network, listener
        self.now, self.busy, self.moving = np.zeros((3, network.world))

    def step(self, name: str, transfers: Transfers, seconds: Array, hides: bool, backward: bool) -> None:
        """An operator: what it needs arrives, unless computing hides it while it travels, and it is computed."""
        before = self.now
        arrived = self._arrivals(name, transfers, backward, before + seconds if hides else before)
        starts = before if hides else arrived
        computed = starts + seconds
        self.now = np.maximum(computed, arrived)
        self.busy = self.busy + seconds
        self._tell("compute", name, backward, False, starts, computed)
        if hides:
            self._tell("compute", name, backward, True, computed, self.now)

    def _arrivals(self, name: str, transfers: Transfers, backward: bool, idle: Array) -> Array:
        """When every rank has what was sent to it, if all start now. From ``idle`` on they do nothing else."""
        now = self.now
        for rounds, itemsize in transfers:
            for one in rounds:
                messages = self.network.messages(one, itemsize)
                if not messages.seconds.any():
                    continue
                ready = np.maximum(now, np.where(messages.pairs, now[:, None], 0.0).max(0))
                self._tell("transfer", name, backward, True, now, ready)
                now = ready + messages.seconds
                self._tell("transfer", name, backward, False, ready, now)
                self.moving = self.moving + np.maximum(now - np.maximum(ready, idle), 0.0)
        return now

    def _tell(self, thread: Thread, name: str, backward: bool, waits: bool, starts: Array, ends: Array) -> None:
        if self.listener is not None:
            for device in np.flatnonzero(ends > starts):
                span = float(starts[device]), float(ends[device])
                self.listener(Event(int(device), thread, name, backward, waits, *span))


def run(
    clocks: Clocks,
    applied: Sequence[Applied],
    forward: Sequence[Array],
    backward: Sequence[Array] | None,
    sums: Transfers,
) -> None:
    """A step of operators that take these seconds on each device: forward and, unless that is None, backward."""
    for a, seconds in zip(applied, forward, strict=True):
        clocks.step(a.node.name, a.forward, seconds, a.hides, False)
    if backward is None:
        return
    for a, seconds in zip(reversed(applied), reversed(backward), strict=True):
        clocks.step(a.node.name, a.backward, seconds, a.hides, True)
    clocks.step("sums of gradients", sums, np.zeros(clocks.network.world), False, True)
