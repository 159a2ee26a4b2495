"""Tables of the page: cells of text, and what is drawn into them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Cells = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Table of text.

    Attributes:
        title: Title.
        heads: Head of each column.
        rows: Cells of each row.
        marked: Indices of rows that stand out.
        bars: Length of a bar in the last column of each row, from 0 to 1; empty for none.
    """

    title: str
    heads: Cells
    rows: tuple[Cells, ...]
    marked: frozenset[int] = frozenset()
    bars: tuple[float, ...] = ()

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether each column holds numbers, which are aligned to the right."""
        return tuple(
            _are_numbers(row[k] for row in self.rows) for k in range(len(self.heads))
        )


def _are_numbers(cells: Iterable[str]) -> bool:
    given = [cell.rstrip("x%") for cell in cells if cell not in ("", "-")]
    try:
        return bool([float(cell) for cell in given])
    except ValueError:
        return False


def fractions(numbers: Sequence[float]) -> tuple[float, ...]:
    """Returns numbers as parts of the largest."""
    largest = max(numbers, default=0.0)
    return tuple(number / largest if largest > 0 else 0.0 for number in numbers)
