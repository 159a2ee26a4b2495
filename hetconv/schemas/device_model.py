"""Models of performance, as a profile has them: seconds of operators on a device, and
of bytes between two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from hetconv.errors import ProfileError

from .json_files import STRICT, AtLeastZero, Positive
from .provenance import DeviceIdentity, MeasurementConditions

Axis = Literal[
    "pixels", "filters", "channels"
]  # what a share is a share of; pixels are rows, columns or samples too


@dataclass(frozen=True)
class Curve:
    """Seconds as a piecewise-linear function of a share, in (0, 1], or of bytes; nothing costs 0.

    It may fall between two points, where kernels take a whole block faster than a part,
    but not beyond them.
    """

    shares: tuple[Positive, ...]
    seconds: tuple[AtLeastZero, ...]
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.shares, self.shares[1:], strict=False))
        if (
            not self.shares
            or len(self.shares) != len(self.seconds)
            or not rising
            or self.shares[0] <= 0
        ):
            raise ProfileError(
                "a curve needs rising positive shares and as many seconds"
            )

    def at(self, share: float) -> float:
        if share <= 0:
            return 0.0
        x, y = self.shares, self.seconds
        if len(x) == 1:
            return y[0] * share / x[0]
        i = min(max(bisect_left(x, share), 1), len(x) - 1)
        slope = (y[i] - y[i - 1]) / (x[i] - x[i - 1])
        if not x[0] <= share <= x[-1]:
            slope = max(slope, 0.0)
        near = i if share > x[-1] else i - 1
        return max(y[near] + slope * (share - x[near]), 0.0)


@dataclass(frozen=True)
class OperatorModel:
    """Seconds of one operator along one axis, forward and backward apart.

    ``measured`` with its device, unless it says otherwise.
    """

    forward: Curve
    backward: Curve
    measured: MeasurementConditions | None = None
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class Copying:
    """What messages through memory take the devices themselves, while all of a host are
    at it, in seconds per byte.

    ``sends``: of a message, to put it where the receiver reads it, whoever may wait
    there; ``joins``: of what is put together of messages and a device's own part;
    ``adds``: of what is added to something.
    """

    sends: Positive
    joins: Positive
    adds: Positive
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class DeviceModel:
    """One device, while all are at work. What was not measured takes the roofline
    fitted to what was.

    ``operators``: layers by operator and axis; ``others``: of what a plan does not
    name, by kind and dtype, the seconds of bytes read and written. ``flops_per_s`` by
    dtype, with ``tf32`` beside ``float32`` where convolutions of float32 run on tensor
    cores. ``overhead_s``: what the host takes to call an operator, and
    ``backward_overhead_s`` what training adds to that; where it is not known, the first
    times ``backward_ratio``. ``corrections``, by kind of split: what layers were found
    to take in whole steps, of what they take one by one. ``measured``: under which
    conditions; nothing was, if it says nothing. ``copying``: of messages to ranks of its
    host, unless links carry them by themselves.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: Positive
    flops_per_s: Annotated[Mapping[str, Positive], Field(min_length=1)]
    bytes_per_s: Positive
    overhead_s: AtLeastZero = 0.0
    backward_ratio: AtLeastZero = 2.0
    emulated: bool = False
    operators: Mapping[str, OperatorModel] = field(default_factory=dict)
    identity: DeviceIdentity | None = None
    measured: MeasurementConditions | None = None
    backward_overhead_s: AtLeastZero | None = None
    others: Mapping[str, OperatorModel] = field(default_factory=dict)
    corrections: Mapping[str, Positive] = field(default_factory=dict)
    copying: Copying | None = None
    __pydantic_config__ = STRICT

    def rate(self, dtype: str) -> float:
        """Flops per second; a ``dtype`` of which nothing is known takes float32's."""
        return (
            self.flops_per_s.get(dtype)
            or self.flops_per_s.get("float32")
            or max(self.flops_per_s.values())
        )

    def overhead(self, backward: bool) -> float:
        """Seconds of the host for one operator in this pass."""
        if not backward:
            return self.overhead_s
        known = self.backward_overhead_s
        return known if known is not None else self.overhead_s * self.backward_ratio

    def roofline(
        self, flops: float, moved_bytes: float, dtype: str, backward: bool
    ) -> float:
        """Seconds of an unmeasured operator: the longer of computing and moving, and
        what a call costs.
        """
        if flops + moved_bytes <= 0:
            return 0.0
        once = max(flops / self.rate(dtype), moved_bytes / self.bytes_per_s)
        return once * (self.backward_ratio if backward else 1.0) + self.overhead(
            backward
        )


@dataclass(frozen=True)
class LinkModel:
    """A pair of devices: seconds = latency + bytes * seconds per byte; ``measured``, or
    from a data sheet.

    ``back_s_per_byte``: from the second device to the first, if that is another number.
    """

    latency_s: AtLeastZero
    s_per_byte: AtLeastZero
    measured: MeasurementConditions | None = None
    back_s_per_byte: AtLeastZero | None = None
    __pydantic_config__ = STRICT

    def turned(self) -> LinkModel:
        """The same link seen from the second device."""
        if self.back_s_per_byte is None:
            return self
        return replace(
            self, s_per_byte=self.back_s_per_byte, back_s_per_byte=self.s_per_byte
        )


@dataclass(frozen=True)
class SharedWire:
    """What the messages of several (sender, receiver) pairs share, such as a network
    card in one direction.

    ``measured``, or from a data sheet.
    """

    name: str
    pairs: tuple[tuple[int, int], ...]
    s_per_byte: AtLeastZero
    measured: MeasurementConditions | None = None
    __pydantic_config__ = STRICT
