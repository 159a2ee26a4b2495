"""Devices that are slowed on purpose, to try uneven pairs on one machine.

``cpu@0.5`` computes at half the speed of ``cpu``. Every local convolution and linear
layer, forward and backward, is followed by a sleep: a hook around them (see
`hetconv.kernels.compute_hook`) is installed while the device is slowed, or while there is
a listener. A CPU with one thread has that speed however often others use its core: it
sleeps less for the time that it waited for the core. So two of ``cpu@0.5`` can share
one. What is measured or printed of such a device is marked as emulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hetconv.comm.cpu_time import waits_s
from hetconv.errors import HetConvError
from hetconv.kernels.compute_hook import set_compute_hook

T = TypeVar("T")


class _Clocks(NamedTuple):
    """Seconds by the wall, and by the thread's own clock."""

    wall: float
    own: float


class Computation(NamedTuple):
    """A computation that was slowed.

    Attributes:
        start: seconds of time.perf_counter.
        end: likewise, as if nothing had been waited for before it.
        own_s: seconds of the thread's clock, without sleep or others' turns on the core.
    """

    start: float
    end: float
    own_s: float


_slowness = 1.0
_overslept = 0.0  # seconds, of all sleeps so far, and waited between what was stretched
_waited = 0.0  # seconds until the last time that something had been stretched
_aside = _Clocks(0.0, 0.0)  # so far, in all that was stretched
# the latest that a timer wakes a process, in seconds, while others use its core for a
# turn
LATE = 5e-3
_listeners: list[Callable[[Computation], None]] = []


@dataclass(frozen=True)
class DeviceName:
    """A device of torch, and the speed that is left of it.

    It is written ``cpu``, ``cuda:1`` or, slowed on purpose, ``cpu@0.5``.
    """

    device: str
    speed: float = 1.0

    @staticmethod
    def parse(text: str) -> DeviceName:
        """Reads a device.

        Raises:
            HetConvError: the text is neither a CPU nor a CUDA device, or the speed is outside
                (0, 1].
        """
        device, at, speed = text.strip().partition("@")
        try:
            parsed = DeviceName(str(torch.device(device)), float(speed) if at else 1.0)
        except (RuntimeError, ValueError) as e:
            raise HetConvError(
                f"device {text!r} is not understood; write cpu, cuda:0, or cpu@0.5 for half speed"
            ) from e
        if (
            torch.device(device).type not in ("cpu", "cuda")
            or not 0 < parsed.speed <= 1
        ):
            raise HetConvError(
                f"device {text!r} is neither a CPU nor a CUDA device at a speed between 0 and 1"
            )
        return parsed

    @property
    def emulated(self) -> bool:
        """Whether the device is slowed on purpose."""
        return self.speed < 1

    def __str__(self) -> str:
        return f"{self.device}@{self.speed:g}" if self.emulated else self.device


def set_speed(speed: float) -> None:
    """From now on this process computes at ``speed`` (0 < speed <= 1) of what it could."""
    global _slowness, _overslept
    if not 0 < speed <= 1:
        raise HetConvError(
            f"an emulated speed of {speed} was asked for; give one above 0 and at most 1"
        )
    forget_waits()
    _slowness, _overslept = 1 / speed, 0.0
    _install()


def slowness() -> float:
    """How many times as long as it could this process takes for what is `stretched`."""
    return _slowness


def forget_waits() -> None:
    """No sleep is shorter any more for what this thread waited for its core until now."""
    global _waited
    _waited = waits_s()


def as_it_is() -> bool:
    """Whether nothing is slowed and nobody listens, so that `stretched` does nothing."""
    return _slowness == 1 and not _listeners


@contextmanager
def listening(listener: Callable[[Computation], None]) -> Iterator[None]:
    """Context in which ``listener`` is called after every computation."""
    _listeners.append(listener)
    _install()
    try:
        yield
    finally:
        _listeners.remove(listener)
        _install()


class _Stretching:
    """The hook around the local computations of layers."""

    def once(self, compute: Callable[[], T], device: torch.device) -> T:
        return stretched(compute, device)

    def with_backward(
        self, compute: Callable[[], Tensor], device: torch.device
    ) -> Tensor:
        return both_stretched(compute, device)


def _install() -> None:
    set_compute_hook(None if as_it_is() else _Stretching())


class _Begun(NamedTuple):
    at: _Clocks
    aside: _Clocks
    # seconds, for the core since the last computation, which the sleep is to make good
    waited: float


def stretched(compute: Callable[[], T], device: torch.device) -> T:
    """Runs ``compute``, and sleeps for as much longer as the emulated speed says."""
    if as_it_is():
        return compute()
    begun = _begin(device)
    result = compute()
    _finish(begun, device)
    return result


def both_stretched(compute: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Slows a computation, and the backward of its one autograd node.

    The node may be followed by views of its result, as a linear layer's is.
    """
    y = stretched(compute, device)
    if as_it_is():
        return y
    node = y.grad_fn
    while node is not None and "View" in node.name():
        node = node.next_functions[0][0]
    if node is not None:
        begun: list[_Begun] = []
        node.register_prehook(lambda *_: begun.append(_begin(device)))
        node.register_hook(lambda *_: _finish(begun.pop(), device))
    return y


def _begin(device: torch.device) -> _Begun:
    global _overslept
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    waited = max(waits_s() - _waited, 0.0) if _shares_its_core(device) else 0.0
    waited = min(waited, LATE - _overslept)
    _overslept += waited
    return _Begun(_now(), _aside, waited)


def _finish(begun: _Begun, device: torch.device) -> None:
    """Sleeps for the rest. What was stretched in the middle is not stretched again."""
    global _overslept, _aside
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    done = _now()
    seconds = done.wall - begun.at.wall - (_aside.wall - begun.aside.wall)
    own_s = done.own - begun.at.own - (_aside.own - begun.aside.own)
    rest = (own_s if _shares_its_core(device) else seconds) * _slowness - seconds
    heard = time.perf_counter()
    if (
        _slowness > 1 and rest > _overslept
    ):  # to sleep for no time takes as long as the timer is late
        time.sleep(rest - _overslept)
    slept = time.perf_counter() - heard
    # A sleep ends late: the next one is that much shorter, but for what a busy machine,
    # not the timer, took.
    _overslept = min(_overslept + slept - rest, LATE)
    for listener in _listeners:
        listener(Computation(begun.at.wall, done.wall + slept + begun.waited, own_s))
    if _shares_its_core(device):
        forget_waits()
    _aside = _with_time_since(begun.at, begun.aside)


def _now() -> _Clocks:
    return _Clocks(time.perf_counter(), time.thread_time())


def _with_time_since(began: _Clocks, before: _Clocks) -> _Clocks:
    now = _now()
    return _Clocks(
        before.wall + now.wall - began.wall, before.own + now.own - began.own
    )


def _shares_its_core(device: torch.device) -> bool:
    """Whether this process sleeps less for what others had its core."""
    return _slowness > 1 and tells_turns(device)


def tells_turns(device: torch.device) -> bool:
    """Returns whether the thread's clock tells when others have its core.

    It does for a CPU with one thread.
    """
    return device.type == "cpu" and torch.get_num_threads() == 1
