"""Devices slowed on purpose: ``cpu@0.5`` computes at half the speed of ``cpu``.

With them, devices of unequal speed can be tried on one machine. A hook around every
local convolution and linear layer (see `hetconv.kernels.compute_hook`) sleeps after
each computation, forward and backward.

Ranks on slowed CPUs may share a core. What such a rank, if it computes in one thread,
waits for the core while others run on it counts as sleep. So it keeps the speed that
its name says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hetconv.comm.thread_time import waits_s
from hetconv.errors import HetConvError
from hetconv.kernels.compute_hook import set_compute_hook

# By which a timer wakes a process late while another one has its turn on the core.
MAX_TIMER_DELAY_S = 5e-3

T = TypeVar("T")


@dataclass(frozen=True)
class DeviceName:
    """A torch device and the part of its speed that is left.

    Attributes:
        device: As torch writes it: ``cpu`` or ``cuda:1``.
        speed: In (0, 1]; below 1 the device is slowed on purpose.
    """

    device: str
    speed: float = 1.0

    @staticmethod
    def parse(text: str) -> DeviceName:
        """Reads a name such as ``cpu``, ``cuda:1`` or ``cpu@0.5``.

        Raises:
            HetConvError: The text names neither a CPU nor a CUDA device, or the speed
                is outside (0, 1].
        """
        device, at, speed = text.strip().partition("@")
        try:
            parsed = DeviceName(str(torch.device(device)), float(speed) if at else 1.0)
        except (RuntimeError, ValueError) as e:
            raise HetConvError(
                f"device {text!r} is not understood; write cpu, cuda:0, or cpu@0.5 for half speed"
            ) from e
        known = torch.device(device).type in ("cpu", "cuda")
        if not known or not 0 < parsed.speed <= 1:
            raise HetConvError(
                f"device {text!r} is neither a CPU nor a CUDA device at a speed between 0 and 1; "
                "write cpu, cuda:0, or cpu@0.5 for half speed"
            )
        return parsed

    @property
    def emulated(self) -> bool:
        """Whether the device is slowed on purpose."""
        return self.speed < 1

    def __str__(self) -> str:
        return f"{self.device}@{self.speed:g}" if self.emulated else self.device


class Computation(NamedTuple):
    """Record of a computation that is over.

    Attributes:
        start: By `time.perf_counter`, in seconds.
        end: Likewise, after the sleep of a slowed device, as if the sleep had not been
            shorter for what the thread waited before the computation.
        thread_s: Seconds of the thread's own clock, which counts neither the sleep nor
            the turns of others on the core.
    """

    start: float
    end: float
    thread_s: float


class _Times(NamedTuple):
    wall_s: float
    thread_s: float

    def minus(self, other: _Times) -> _Times:
        return _Times(self.wall_s - other.wall_s, self.thread_s - other.thread_s)


class _Start(NamedTuple):
    wall_s: float
    net: _Times  # without all computations that were over by then
    waited_s: float


_slowdown = 1.0
_listeners: list[Callable[[Computation], None]] = []
_computed = _Times(0.0, 0.0)  # in all computations so far
# By which the next sleep is shorter, because earlier ones ended late or the thread
# waited for its core since the last computation.
_late_s = 0.0
_counted_waits_s = 0.0  # by `waits_s`; only later waits make a sleep shorter


def set_speed(speed: float) -> None:
    """Slows this process from now on.

    Args:
        speed: The part of its speed that is left, in (0, 1].

    Raises:
        HetConvError: The speed is outside (0, 1].
    """
    global _slowdown, _late_s
    if not 0 < speed <= 1:
        raise HetConvError(
            f"an emulated speed of {speed} was asked for; give one above 0 and at most 1"
        )
    discard_core_waits()
    _slowdown, _late_s = 1 / speed, 0.0
    _update_hook()


def slowdown() -> float:
    """Returns how many times as long this process computes as at full speed."""
    return _slowdown


def discard_core_waits() -> None:
    """Makes the next sleep no shorter for what the thread waited for its core so far."""
    global _counted_waits_s
    _counted_waits_s = waits_s()


@contextmanager
def listen_to_computations(listener: Callable[[Computation], None]) -> Iterator[None]:
    """Calls ``listener`` after each computation of a layer within the block."""
    _listeners.append(listener)
    _update_hook()
    try:
        yield
    finally:
        _listeners.remove(listener)
        _update_hook()


def throttled(compute: Callable[[], T], device: torch.device) -> T:
    """Runs a computation, and sleeps for as long as the speed of this process says.

    Args:
        compute: The computation. Throttled ones within it are not slowed twice.
        device: The device of this rank.

    Returns:
        What ``compute`` returns.
    """
    if not _active():
        return compute()
    start = _begin(device)
    result = compute()
    _finish(start, device)
    return result


def throttled_with_backward(
    compute: Callable[[], Tensor], device: torch.device
) -> Tensor:
    """Throttles a computation and the node of autograd's graph that it makes.

    Args:
        compute: The computation, such as a convolution of PyTorch's. Its node may be
            followed by views of the result, as that of a linear layer is.
        device: The device of this rank.

    Returns:
        What ``compute`` returns.
    """
    y = throttled(compute, device)
    node = y.grad_fn if _active() else None
    while node is not None and "View" in node.name():
        node = node.next_functions[0][0]
    if node is not None:
        starts: list[_Start] = []
        node.register_prehook(lambda *_: starts.append(_begin(device)))
        node.register_hook(lambda *_: _finish(starts.pop(), device))
    return y


def computes_in_one_thread(device: torch.device) -> bool:
    """Tells whether the calling thread's clock counts all that a device computes."""
    return device.type == "cpu" and torch.get_num_threads() == 1


class _ThrottleHook:
    once = staticmethod(throttled)
    with_backward = staticmethod(throttled_with_backward)


def _active() -> bool:
    return _slowdown > 1 or bool(_listeners)


def _update_hook() -> None:
    set_compute_hook(_ThrottleHook() if _active() else None)


def _begin(device: torch.device) -> _Start:
    global _late_s
    _synchronize(device)
    waited_s = 0.0
    if _counts_waits(device):
        # The last count may be another thread's.
        waited_s = max(waits_s() - _counted_waits_s, 0.0)
        waited_s = min(waited_s, MAX_TIMER_DELAY_S - _late_s)
    _late_s += waited_s
    now = _now()
    return _Start(now.wall_s, now.minus(_computed), waited_s)


def _finish(start: _Start, device: torch.device) -> None:
    global _late_s, _computed
    _synchronize(device)
    end = _now()
    wall_s, thread_s = end.minus(_computed).minus(start.net)
    busy_s = thread_s if _counts_waits(device) else wall_s
    pause_s = busy_s * _slowdown - wall_s
    slept_s = _sleep(pause_s - _late_s)
    # On a busy machine a sleep may last much longer than for what the timer is late.
    _late_s = min(_late_s + slept_s - pause_s, MAX_TIMER_DELAY_S)
    unshortened_end = end.wall_s + slept_s + start.waited_s
    for listener in _listeners:
        listener(Computation(start.wall_s, unshortened_end, thread_s))
    if _counts_waits(device):
        discard_core_waits()
    _computed = _now().minus(start.net)


def _sleep(seconds: float) -> float:
    """Returns how long the sleep took."""
    if seconds <= 0:
        return 0.0
    start = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - start


def _counts_waits(device: torch.device) -> bool:
    """Tells whether sleeps are shorter for what the thread waits for its core."""
    return _slowdown > 1 and computes_in_one_thread(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _now() -> _Times:
    return _Times(time.perf_counter(), time.thread_time())
