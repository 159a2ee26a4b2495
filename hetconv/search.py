"""The search for the best combination of the layers' choices, and what every other choice would have cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from .candidates import Candidates
from .elimination import solve
from .explain import considered
from .memory import Limits, solve_within
from .plan import Considered
from .pricing import Pricer
from .problem import tables
from .proportions import Splits
from .rules import Split

Choices = Mapping[str, tuple[Split, ...]]


class Search:
    """The layers' choices, what they cost, and what they mean."""

    def __init__(self, ways: Candidates, pricer: Pricer, choices: Choices):
        self.ways, self.pricer, self.choices = ways, pricer, choices
        self.tables = tables(ways.graph, ways.profile, choices, ways.mode)

    def splits(self, choice: Mapping[str, int]) -> Splits:
        return {name: of_layer[choice[name]] for name, of_layer in self.choices.items()}

    def memory(self, choice: Mapping[str, int]) -> tuple[int, ...]:
        return self.pricer.memory(self.splits(choice))

    def best(self, limits: Limits) -> Splits | None:
        """The best combination; None if none was found that fits the memory."""
        choice = solve(self.tables.unary, self.tables.pairwise).choice
        if all(m <= c for m, c in zip(self.memory(choice), limits, strict=True)):
            return self.splits(choice)
        within = solve_within(self.tables, limits, self.memory)
        return self.splits(within) if within is not None else None

    def considered(self, chosen: Splits) -> dict[str, tuple[Considered, ...]]:
        """Of each layer, all its choices beside the chosen one, with the other layers as chosen."""
        if any(chosen[name] not in of_layer for name, of_layer in self.choices.items()):
            more: dict[tuple[Split, ...], tuple[Split, ...]] = {}  # equal layers go on having the same object
            added = {n: tuple(dict.fromkeys((*c, chosen[n]))) for n, c in self.choices.items()}
            return Search(self.ways, self.pricer, {n: more.setdefault(c, c) for n, c in added.items()}).considered(
                chosen
            )
        return considered(self.tables, self.choices, {n: c.index(chosen[n]) for n, c in self.choices.items()})
