"""The search for the best combination of the layers' choices, and what every other choice would have cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from hetconv.cost.estimator import Pricer
from hetconv.schemas.plan import Considered
from hetconv.sharding.layer_rules import SPACE, Split
from hetconv.solver.elimination import solve

from .candidates import Candidates
from .explain import considered
from .memory_limits import Choice, Limits, solve_within
from .partition import Splits, Weights, is_there
from .table_builder import tables

TURNS = 24  # of taking from who has too little memory, until all have enough
Choices = Mapping[str, tuple[Split, ...]]


class Search:
    """The layers' choices, what they cost, and what they mean."""

    def __init__(self, ways: Candidates, pricer: Pricer, choices: Choices):
        self.ways, self.pricer, self.choices = ways, pricer, choices
        self.tables = tables(ways.graph, ways.profile, choices, ways.mode)
        self.roomy: list[Splits] = []  # whole models that fit, where what is fastest does not

    @classmethod
    def within(cls, ways: Candidates, pricer: Pricer, limits: Limits) -> Search:
        """With proportions for which there is room among the choices, where what would be fastest does not fit."""
        pool = ways.pool()
        search = cls(ways, pricer, ways.choices(pool))
        if search.fits(search.fastest, limits):
            return search
        roomy = _with_room(ways, pricer, limits)
        search = cls(ways, pricer, ways.choices([*dict.fromkeys(weights for weights, _ in roomy), *pool]))
        search.roomy = [splits for _, splits in roomy]
        return search

    @cached_property
    def fastest(self) -> Choice:
        """Whatever memory it takes."""
        return solve(self.tables.unary, self.tables.pairwise).choice

    def fits(self, choice: Choice, limits: Limits) -> bool:
        return all(m <= c for m, c in zip(self.memory(choice), limits, strict=True))

    def splits(self, choice: Mapping[str, int]) -> Splits:
        return {name: of_layer[choice[name]] for name, of_layer in self.choices.items()}

    def memory(self, choice: Mapping[str, int]) -> tuple[int, ...]:
        return self.pricer.memory(self.splits(choice))

    def best(self, limits: Limits) -> Splits | None:
        """The best combination; None if none was found that fits the memory."""
        if self.fits(self.fastest, limits):
            return self.splits(self.fastest)
        within = solve_within(self.tables, limits, self.memory)
        found = [*self.roomy, *([self.splits(within)] if within is not None else [])]
        return min(found, default=None, key=lambda splits: self.pricer.price(splits)[0].step_s)

    def considered(self, chosen: Splits) -> dict[str, tuple[Considered, ...]]:
        """Of each layer, all its choices beside the chosen one, with the other layers as chosen."""
        if any(chosen[name] not in of_layer for name, of_layer in self.choices.items()):
            more: dict[tuple[Split, ...], tuple[Split, ...]] = {}  # equal layers go on having the same object
            added = {n: tuple(dict.fromkeys((*c, chosen[n]))) for n, c in self.choices.items()}
            return Search(self.ways, self.pricer, {n: more.setdefault(c, c) for n, c in added.items()}).considered(
                chosen
            )
        return considered(self.tables, self.choices, {n: c.index(chosen[n]) for n, c in self.choices.items()})


def _with_room(ways: Candidates, pricer: Pricer, limits: Limits) -> list[tuple[Weights, Splits]]:
    """Whole models, each cut in one way, that fit: in proportions as near to the balanced ones as that goes."""
    found = []
    for kind in (kind for kind in (*SPACE, "sample") if kind in ways.kinds and is_there(ways.graph, kind)):
        weights = ways.balance(kind)
        for _ in range(TURNS):
            splits = ways.whole(kind, weights)
            over = [max(m / c, 1.0) for m, c in zip(pricer.memory(splits), limits, strict=True)]
            if max(over) == 1:
                found.append((weights, splits))
                break
            weights = tuple(w / o for w, o in zip(weights, over, strict=True))
    return found
