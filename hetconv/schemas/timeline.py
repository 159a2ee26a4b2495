"""Simulated step in a plan file: when each device computes, transfers and waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple, get_args

from hetconv.errors import PlanError

from .json_files import STRICT

Thread = Literal["compute", "transfer"]
THREADS: tuple[Thread, ...] = get_args(Thread)


class Event(NamedTuple):
    """Time span in which a device works or waits for one operator.

    The two threads of a device are busy at the same time only where halos travel while
    it computes.

    Attributes:
        device: Rank of the device.
        thread: Thread of the device.
        name: Name of the operator.
        backward: Whether the device works for the operator's gradient.
        waits: Whether the thread waits: the one that transfers for a sender, the one
            that computes for halos.
        start_s: Seconds from the start of the step.
        end_s: Seconds from the start of the step.
    """

    device: int
    thread: Thread
    name: str
    backward: bool
    waits: bool
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Spans:
    """Time spans of one kind, by columns: number i of each column is of span i.

    Attributes:
        devices: Rank of the device.
        operators: Index of the operator in `Timeline.forward`, or, counted on from its
            end, in `Timeline.backward`.
        start_ns: Nanoseconds from the start of the step.
        duration_ns: Nanoseconds.
    """

    devices: tuple[int, ...] = ()
    operators: tuple[int, ...] = ()
    start_ns: tuple[int, ...] = ()
    duration_ns: tuple[int, ...] = ()
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class Timeline:
    """Simulated step.

    Attributes:
        forward: Names of the operators, in the order in which they run forward.
        backward: Names of the operators, in the order in which they run backward.
        computes: Spans in which a device computes.
        waits_for_halos: Spans in which it has computed and waits for halos.
        transfers: Spans in which it sends or receives.
        waits_for_sender: Spans in which it waits for a sender.
    """

    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    computes: Spans = Spans()
    waits_for_halos: Spans = Spans()
    transfers: Spans = Spans()
    waits_for_sender: Spans = Spans()
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        count = len(self.forward) + len(self.backward)
        for _, _, spans in self._kinds():
            columns = spans.devices, spans.start_ns, spans.duration_ns
            if any(len(column) != len(spans.operators) for column in columns):
                raise PlanError(
                    "timeline: the columns of its spans differ in length; give one number "
                    "for each span"
                )
            unknown = [k for k in spans.operators if not 0 <= k < count]
            if unknown or min(chain(*columns), default=0) < 0:
                raise PlanError(
                    f"timeline: has {count} operators, and a span of operator "
                    f"{unknown[0]}"
                    if unknown
                    else "timeline: a span has a negative number"
                )

    @staticmethod
    def of(events: Iterable[Event]) -> Timeline:
        """Returns a timeline of events, to the nanosecond.

        Both ends of an event are rounded, so that adjacent events do not overlap.
        """
        known = list(events)
        names = {
            backward: tuple(
                dict.fromkeys(e.name for e in known if e.backward == backward)
            )
            for backward in (False, True)
        }
        index = {
            key: k
            for k, key in enumerate(
                (backward, name) for backward in names for name in names[backward]
            )
        }

        def spans(thread: Thread, waits: bool) -> Spans:
            kind = [e for e in known if (e.thread, e.waits) == (thread, waits)]
            starts = tuple(round(e.start_s * 1e9) for e in kind)
            return Spans(
                tuple(e.device for e in kind),
                tuple(index[e.backward, e.name] for e in kind),
                starts,
                tuple(
                    round(e.end_s * 1e9) - start
                    for e, start in zip(kind, starts, strict=True)
                ),
            )

        kinds = [spans(thread, waits) for thread, waits, _ in Timeline()._kinds()]
        return Timeline(names[False], names[True], *kinds)

    def events(self) -> Iterator[Event]:
        """Returns the events, kind by kind."""
        names = self.forward + self.backward
        for thread, waits, spans in self._kinds():
            for device, k, start, duration in zip(
                spans.devices,
                spans.operators,
                spans.start_ns,
                spans.duration_ns,
                strict=True,
            ):
                backward, end = k >= len(self.forward), start + duration
                yield Event(
                    device,
                    thread,
                    names[k],
                    backward,
                    waits,
                    start / 1e9,
                    end / 1e9,
                )

    @property
    def step_s(self) -> float:
        """Seconds until the last device is done."""
        ends = (
            start + duration
            for _, _, spans in self._kinds()
            for start, duration in zip(spans.start_ns, spans.duration_ns, strict=True)
        )
        return max(ends, default=0) / 1e9

    @property
    def world(self) -> int:
        """Number of ranks, up to the last one that does anything."""
        ranks = chain(*(spans.devices for _, _, spans in self._kinds()))
        return max(ranks, default=-1) + 1

    def _kinds(self) -> tuple[tuple[Thread, bool, Spans], ...]:
        """Returns thread, whether it waits, and the spans of each kind."""
        return (
            ("compute", False, self.computes),
            ("compute", True, self.waits_for_halos),
            ("transfer", False, self.transfers),
            ("transfer", True, self.waits_for_sender),
        )
