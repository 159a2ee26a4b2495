"""Cost of moving values between operators, for all pairs of layouts at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hetconv.cost.memory import receive_buffer_table
from hetconv.cost.network import Array, Network
from hetconv.cost.redistribution import MovedValue, movement_tables
from hetconv.sharding.layout import Layout, ReadRegion
from hetconv.sharding.moves import Move
from hetconv.tracing.graph import Value

from .cost_tables import CostTables, ReceiveBuffers
from .joins import LayoutByChoice, Strategies

T = TypeVar("T")
Mask = npt.NDArray[np.bool_]


class IdentityCache:
    """Results by key, where layouts, and tuples of them, are compared by identity.

    Layouts take long to compare. Equal operators share them, so identity finds most
    equal keys.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def get(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Returns what was made for an equal key, or makes it.

        Args:
            key: Names the result and all that it depends on.
            make: Makes the result.
        """
        ids = tuple(
            id(part)
            if isinstance(part, tuple | Strategies | Layout | ReadRegion)
            else part
            for part in key
        )
        if ids not in self._results:
            # The key is kept alive, so that no other object gets one of its ids.
            self._results[ids] = make(), key
        found: T = self._results[ids][0]
        return found


class Overlap(NamedTuple):
    """Where an operator computes while halos travel.

    Attributes:
        where: Mask of shape (layouts of the source, reads).
        compute_s: Seconds of each pass, of shape (reads,).
    """

    where: Mask
    compute_s: Sequence[Array]


class _Movement(NamedTuple):
    """Movement of a value between the choices of two variables, in one pass."""

    source: str | None
    reader: str | None
    moved: MovedValue
    overlap: tuple[Mask, Array] | None


class MovementCosts:
    """Movements of a graph, whose seconds are computed together at the end.

    That takes a fraction of the time that one movement after another takes.

    Args:
        tables: Receives the costs.
        network: Links between the devices.
        passes: Passes of a step, as whether each is the backward one.
        cache: Shares equal movements.
    """

    def __init__(
        self,
        tables: CostTables,
        network: Network,
        passes: Sequence[bool],
        cache: IdentityCache,
    ):
        self.tables, self.network = tables, network
        self.passes, self.cache = passes, cache
        self._movements: list[_Movement] = []
        self._extra: list[tuple[str | None, list[list[MovedValue]]]] = []

    def add(
        self,
        value: Value,
        source: LayoutByChoice,
        reads: tuple[Layout | ReadRegion, ...],
        reader: str | None,
        *,
        overlap: Overlap | None,
        gradient: bool,
    ) -> None:
        """Adds the movement of a value to a reader, and of its gradient back.

        Args:
            value: Value that is moved.
            source: Its layouts.
            reads: What the reader reads, by choice of ``reader``.
            reader: Variable that decides what is read, if any does.
            overlap: Where the reader computes meanwhile.
            gradient: Whether the reader has a gradient of the value.
        """
        layouts = source.layouts
        if source.variable == reader and all(
            x is read for x, read in zip(layouts, reads, strict=True)
        ):
            return
        if overlap is not None and not overlap.where.any():
            overlap = None
        mask = overlap.where if overlap is not None else None
        mask_bytes = mask.tobytes() if mask is not None else b""
        passes = self.passes if gradient and value.requires_grad else (False,)
        for k, backward in enumerate(passes):
            moved = self.cache.get(
                (layouts, reads, value.itemsize, backward, mask_bytes),
                partial(MovedValue, layouts, reads, value.itemsize, backward, mask),
            )
            hidden = (
                (overlap.where, overlap.compute_s[k]) if overlap is not None else None
            )
            self._movements.append(_Movement(source.variable, reader, moved, hidden))
            if not backward and True in self.passes:
                count_bytes = self.cache.get(
                    ("receive buffers", moved),
                    partial(partial, receive_buffer_table, moved),
                )
                self.tables.receive_buffers.append(
                    ReceiveBuffers(source.variable, reader, count_bytes)
                )

    def add_operator_moves(
        self,
        variable: str | None,
        strategies: Strategies,
        itemsize: int,
        *,
        backward: bool,
    ) -> None:
        """Adds what an operator moves itself, such as sums of statistics.

        Args:
            variable: Variable that decides how the operator runs, if any does.
            strategies: How it runs, by choice.
            itemsize: Bytes of an element of its result.
            backward: Whether its backward runs too.
        """
        moves = [
            () if s.joins_round else (*s.forward_moves, *s.backward_moves * backward)
            for s in strategies.shardings
        ]
        if any(moves):
            by_choice = self.cache.get(
                ("operator moves", strategies, itemsize, backward),
                lambda: [self._moved_values(m, max(itemsize, 4)) for m in moves],
            )
            self._extra.append((variable, by_choice))

    def _moved_values(self, moves: Iterable[Move], itemsize: int) -> list[MovedValue]:
        return [
            self.cache.get(
                (move.src, move.dst, itemsize),
                partial(MovedValue, (move.src,), (move.dst,), itemsize, False),
            )
            for move in moves
        ]

    def charge(self) -> None:
        """Adds the seconds of all movements to the tables."""
        extra = chain.from_iterable(
            chain.from_iterable(by_choice) for _, by_choice in self._extra
        )
        moved_values = chain((m.moved for m in self._movements), extra)
        unique = {id(moved): moved for moved in moved_values}
        tables = movement_tables(list(unique.values()), self.network)
        seconds = dict(zip(unique, tables, strict=True))
        for variable, by_choice in self._extra:
            totals = [
                sum(float(seconds[id(moved)][0, 0]) for moved in moved_values)
                for moved_values in by_choice
            ]
            self.tables.add(variable, np.array(totals))
        for source, reader, moved, overlap in self._movements:
            moving_s = seconds[id(moved)]
            if overlap is not None:
                where, compute_s = overlap
                shorter_s = np.minimum(moving_s, compute_s)
                moving_s = moving_s - self.network.overlap * where * shorter_s
            self.tables.add_pair(source, reader, moving_s)
