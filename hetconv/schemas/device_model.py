"""Performance models in a profile: seconds of operators, and of bytes between devices."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
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

    Attributes:
        shares: Rising shares, or bytes.
        seconds: Seconds at each of them.
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

    def slowed(self, factor: float) -> Curve:
        """Returns the curve with all seconds multiplied by a factor."""
        return Curve(self.shares, tuple(seconds * factor for seconds in self.seconds))

    def at(self, share: float) -> float:
        """Returns the seconds at a share, by linear interpolation."""
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

    Attributes:
        forward: Seconds of the forward pass.
        backward: Seconds of the backward pass.
        measured: When, and under which versions; as its device, if it is missing.
    """

    forward: Curve
    backward: Curve
    measured: MeasurementConditions | None = None
    __pydantic_config__ = STRICT

    def slowed(self, factor: float) -> OperatorModel:
        """Returns the operator on a device that takes ``factor`` times as long."""
        return replace(
            self,
            forward=self.forward.slowed(factor),
            backward=self.backward.slowed(factor),
        )


@dataclass(frozen=True)
class Copying:
    """Seconds per byte that messages through memory take a device, while all of a host send.

    Attributes:
        sends: to write a message where the receiver reads it.
        joins: to assemble messages and the device's own part.
        adds: to add a message to something.
    """

    sends: Positive
    joins: Positive
    adds: Positive
    __pydantic_config__ = STRICT

    def slowed(self, factor: float) -> Copying:
        """Returns the copies of a device that takes ``factor`` times as long."""
        return Copying(self.sends * factor, self.joins * factor, self.adds * factor)


@dataclass(frozen=True)
class DeviceModel:
    """Performance of one device while all are at work.

    What was not measured follows the roofline fitted to what was.

    Attributes:
        name: of the device.
        kind: "cpu" or "cuda".
        memory_bytes: size of its memory.
        flops_per_s: by dtype; ``tf32`` beside ``float32`` where convolutions of float32 run on
            tensor cores.
        bytes_per_s: bandwidth of its memory.
        overhead_s: what the host takes to call an operator.
        backward_ratio: backward over forward, where the backward was not measured.
        emulated: whether it was slowed on purpose.
        operators: layers, by operator and axis.
        identity: which device it is.
        measured: conditions; None for a data sheet.
        backward_overhead_s: what training adds to ``overhead_s``.
        others: operators that are no layers, by kind and dtype: seconds of bytes.
        corrections: by kind of split, factors found in whole steps.
        copying: for messages to ranks of its host; None where links carry them alone.
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

    def slowed(self, factor: float) -> DeviceModel:
        """Returns the same device when all that it does takes longer.

        Args:
            factor: How many times as long it takes, such as 2 where another process has
                half of it.

        Raises:
            ProfileError: The factor is not a positive, finite number.
        """
        if not (isfinite(factor) and factor > 0):
            raise ProfileError(
                f"device {self.name} is to be slowed by {factor}; give a positive, finite "
                "factor: 2 for half the speed"
            )
        if factor == 1:
            return self
        backward_s = self.backward_overhead_s
        return replace(
            self,
            flops_per_s={d: rate / factor for d, rate in self.flops_per_s.items()},
            bytes_per_s=self.bytes_per_s / factor,
            overhead_s=self.overhead_s * factor,
            backward_overhead_s=None if backward_s is None else backward_s * factor,
            operators={k: op.slowed(factor) for k, op in self.operators.items()},
            others={k: op.slowed(factor) for k, op in self.others.items()},
            copying=None if self.copying is None else self.copying.slowed(factor),
        )

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
        """Returns the seconds of an operator that was not measured.

        They are the longer of computation and memory traffic, and the overhead of a call.

        Args:
            flops: operations.
            moved_bytes: read and written.
            dtype: of the arithmetic.
            backward: whether it is a backward pass.
        """
        if flops + moved_bytes <= 0:
            return 0.0
        once = max(flops / self.rate(dtype), moved_bytes / self.bytes_per_s)
        return once * (self.backward_ratio if backward else 1.0) + self.overhead(
            backward
        )


@dataclass(frozen=True)
class LinkModel:
    """A pair of devices: seconds = latency + bytes * seconds per byte.

    Attributes:
        latency_s: of a message.
        s_per_byte: from the first device to the second.
        measured: conditions; None for a data sheet.
        back_s_per_byte: from the second to the first, if it differs.
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
    """What the messages of several pairs share, such as a network card in one direction.

    Attributes:
        name: of the wire.
        pairs: (sender, receiver).
        s_per_byte: seconds per byte of all messages together.
        measured: conditions; None for a data sheet.
    """

    name: str
    pairs: tuple[tuple[int, int], ...]
    s_per_byte: AtLeastZero
    measured: MeasurementConditions | None = None
    __pydantic_config__ = STRICT

    def among(self, number: Mapping[int, int]) -> SharedWire:
        """Returns the wire as some of the ranks use it.

        Args:
            number: New number of each rank that remains.
        """
        pairs = (
            (number[a], number[b]) for a, b in self.pairs if a in number and b in number
        )
        return replace(self, pairs=tuple(pairs))
