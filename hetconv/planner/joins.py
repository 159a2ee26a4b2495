"""How operators without a split of their own run, by the layouts of their inputs.

Where the layouts of several inputs depend on different variables of the cost tables, the
operator is a join. Its layout is decided by a chain of further variables, one for each
input after the first, whose states collect what the inputs so far lead to.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hetconv.cost.network import Array
from hetconv.operators.base import reduce_scattered
from hetconv.operators.shapes import Cat
from hetconv.operators.views import SplitView
from hetconv.sharding.layout import Layout, ReadRegion
from hetconv.sharding.rule import OpSharding
from hetconv.sharding.split import REPLICATE, Split
from hetconv.tracing.graph import Graph, Node

from .cost_tables import zero_where

# Sizes of a concatenation along its sharded dimension add up in many ways.
MAX_JOIN_STATES = 1000


@dataclass(frozen=True, eq=False)
class Strategies:
    """How an operator may run, by the choice of a variable.

    Attributes:
        splits: Split, by choice.
        shardings: How the operator runs, by choice.
        input_layouts: What it reads of each input, by input, then by choice.
        outputs: Layout of each output, by output, then by choice.
    """

    splits: tuple[Split, ...]
    shardings: tuple[OpSharding, ...]
    input_layouts: tuple[tuple[Layout | ReadRegion, ...], ...]
    outputs: tuple[tuple[Layout, ...], ...]

    @staticmethod
    def of(
        node: Node, splits: tuple[Split, ...], shardings: tuple[OpSharding, ...]
    ) -> Strategies:
        """Collects inputs and outputs of an operator.

        Args:
            node: Operator.
            splits: Split, by choice.
            shardings: How the operator runs, by choice.
        """
        reads = tuple(zip(*(s.input_layouts for s in shardings), strict=True))
        if isinstance(node.op, SplitView):
            pieces = [node.op.shardings(s.input_layouts) for s in shardings]  # type: ignore[arg-type]
            layouts = ([piece.output for piece in of_choice] for of_choice in pieces)
            outputs = tuple(zip(*layouts, strict=True))
        else:
            outputs = (tuple(s.output for s in shardings),) * len(node.outputs)
        return Strategies(splits, shardings, reads, outputs)

    @staticmethod
    def unsplit(node: Node, shardings: Sequence[OpSharding]) -> Strategies:
        """Collects inputs and outputs of an operator that has no split of its own.

        Args:
            node: Operator.
            shardings: How it runs, by choice.
        """
        return Strategies.of(node, (REPLICATE,) * len(shardings), tuple(shardings))

    @property
    def replicates(self) -> list[bool]:
        """Whether the result is replicated, by choice."""
        return [s.output.kind == "replicated" for s in self.shardings]


class LayoutByChoice(NamedTuple):
    """Layout of a value, by the choice of a variable.

    Attributes:
        variable: Variable that decides the layout; None if there is one layout only.
        layouts: Layout, by choice.
    """

    variable: str | None
    layouts: tuple[Layout, ...]


# Tables of a join state: (states before, states) and (layouts of an input, states).
# They are 0 where the state follows, and +inf elsewhere.
Link = tuple[Array, Array]


def following_strategies(
    node: Node, replicated: tuple[Layout, ...], inputs: Sequence[LayoutByChoice]
) -> Strategies:
    """Runs an operator on inputs whose layouts at most one variable decides.

    Args:
        node: Operator.
        replicated: Replicated layout of each input, for an operator without inputs.
        inputs: Layouts of each input.
    """
    count = max((len(x.layouts) for x in inputs), default=1)
    columns = [
        x.layouts if x.variable is not None else x.layouts * count for x in inputs
    ]
    rows = list(zip(*columns, strict=True)) or [replicated]
    return Strategies.unsplit(node, [node.op.sharding(row, REPLICATE) for row in rows])


def led_by(
    node: Node,
    replicated: tuple[Layout, ...],
    inputs: Sequence[LayoutByChoice],
    position: int,
) -> list[OpSharding | None]:
    """Runs an operator as one of its inputs leads it, the others replicated.

    Args:
        node: Operator.
        replicated: Replicated layout of each input.
        inputs: Layouts of each input.
        position: Index of the input that leads.

    Returns:
        How the operator runs, by the layout of this input; None where its result would
        be replicated.
    """
    before, after = replicated[:position], replicated[position + 1 :]
    shardings = (
        node.op.sharding((*before, layout, *after), REPLICATE)
        for layout in inputs[position].layouts
    )
    return [s if s.output.kind != "replicated" else None for s in shardings]


@dataclass(frozen=True)
class JoinState:
    """What some inputs of a join lead to.

    Attributes:
        sharding: How the operator runs, if one of these inputs leads it.
        sizes: For a concatenation along its sharded dimension, what each rank holds of
            these inputs along it.
        layouts: Layouts of the inputs that give ``sizes``, or of the one that leads.
        position: Index of the input that leads.
    """

    sharding: OpSharding | None
    sizes: tuple[int, ...] = ()
    layouts: tuple[Layout, ...] = field(default=(), compare=False)
    position: int = field(default=0, compare=False)

    def extended(self, following: JoinState) -> JoinState:
        """Combines with the state of an input that follows; the first leader wins."""
        if self.sharding is not None:
            return self
        if following.sharding is not None:
            return following
        sizes = self.sizes or following.sizes
        if self.sizes and following.sizes:
            sizes = tuple(map(sum, zip(self.sizes, following.sizes, strict=True)))
        return JoinState(None, sizes, self.layouts + following.layouts)


def rebased(
    states: Sequence[JoinState], node: Node, replicated: tuple[Layout, ...]
) -> list[JoinState]:
    """Transfers states to another concatenation that begins with the same inputs.

    Args:
        states: States of the other concatenation's first inputs.
        node: Concatenation to transfer them to.
        replicated: Replicated layout of each of its inputs.
    """
    by_output: dict[Layout, OpSharding] = {}
    found = []
    for state in states:
        if state.sharding is not None:
            output = state.sharding.output
            if output not in by_output:
                before = replicated[: state.position]
                after = replicated[state.position + 1 :]
                inputs = (*before, *state.layouts, *after)
                by_output[output] = node.op.sharding(inputs, REPLICATE)
            state = replace(state, sharding=by_output[output])
        found.append(state)
    return found


def join_states(
    node: Node, replicated: tuple[Layout, ...], inputs: Sequence[LayoutByChoice]
) -> tuple[list[Link], Strategies]:
    """Builds the chain of states of a join.

    Args:
        node: Operator.
        replicated: Replicated layout of each input.
        inputs: Layouts of each input.

    Returns:
        The link for each input after the first, and how the operator runs by the last
        state.
    """
    chain = _chain_states(node, replicated, inputs, add_sizes=True)
    if chain is None:
        chain = _chain_states(node, replicated, inputs, add_sizes=False)
    assert chain is not None
    links, states = chain
    return links, finalize(node, replicated, states)


def _chain_states(
    node: Node,
    replicated: tuple[Layout, ...],
    inputs: Sequence[LayoutByChoice],
    *,
    add_sizes: bool,
) -> tuple[list[Link], list[JoinState]] | None:
    """Extends input by input; gives up where ``add_sizes`` leads to too many states."""
    states, links = input_states(node, replicated, inputs, 0, add_sizes=add_sizes), []
    for k in range(1, len(inputs)):
        own = input_states(node, replicated, inputs, k, add_sizes=add_sizes)
        link, states = extend(states, own, states)
        links.append(link)
        if add_sizes and len(states) > MAX_JOIN_STATES:
            return None
    return links, states


def extend(
    before: Sequence[JoinState], own: Sequence[JoinState], keys: Sequence[Hashable]
) -> tuple[Link, list[JoinState]]:
    """Extends the states of some inputs by the next input.

    Args:
        before: States of the inputs so far.
        own: State of the next input alone, by its layout.
        keys: Key of each state before; states with the same key are one.

    Returns:
        The link to the new states, and these states.
    """
    extended: list[tuple[Hashable, JoinState, JoinState | None]] = []
    for key, state in dict(zip(keys, before, strict=True)).items():
        if state.sharding is not None:
            extended.append((key, state, None))
        else:
            extended += [(key, state, added) for added in dict.fromkeys(own)]
    follows = [[key == k for k, _, _ in extended] for key in keys]
    agrees = [[added is None or added == o for _, _, added in extended] for o in own]
    states = [
        state.extended(added) if added is not None else state
        for _, state, added in extended
    ]
    return (zero_where(follows), zero_where(agrees)), states


def finalize(
    node: Node, replicated: tuple[Layout, ...], states: Sequence[JoinState]
) -> Strategies:
    """Runs a join by the states of all its inputs.

    Args:
        node: Operator.
        replicated: Replicated layout of each input.
        states: States of all inputs together.
    """
    gathered = node.op.sharding(replicated, REPLICATE)
    shardings = []
    for state in states:
        if state.sharding is not None:
            shardings.append(state.sharding)
        elif state.sizes:
            shardings.append(node.op.sharding(state.layouts, REPLICATE))
        else:
            shardings.append(gathered)
    return Strategies.unsplit(node, shardings)


def input_states(
    node: Node,
    replicated: tuple[Layout, ...],
    inputs: Sequence[LayoutByChoice],
    position: int,
    *,
    add_sizes: bool,
) -> list[JoinState]:
    """Finds the state of one input alone, by its layout.

    Args:
        node: Operator.
        replicated: Replicated layout of each input.
        inputs: Layouts of each input.
        position: Index of the input.
        add_sizes: Whether sizes add up in a concatenation along the sharded dimension.
    """
    shardings = led_by(node, replicated, inputs, position)
    found = []
    for layout, sharding in zip(inputs[position].layouts, shardings, strict=True):
        summed = reduce_scattered(layout)
        if add_sizes and isinstance(node.op, Cat) and summed.dim == node.op.dim != 1:
            found.append(JoinState(None, summed.sizes, (layout,)))
        else:
            found.append(JoinState(sharding, (), (layout,), position))
    return found


def nested_concats(graph: Graph) -> set[Node]:
    """Finds concatenations of channels whose first inputs are those of another one.

    The layers of a dense block are such ones.
    """
    concats = [n for n in graph.nodes if isinstance(n.op, Cat) and n.op.dim == 1]
    inputs = {n.inputs for n in concats}
    extending = {n for n in concats if not inputs.isdisjoint(_prefixes(n))}
    prefixes = {prefix for n in extending for prefix in _prefixes(n)}
    return extending | {n for n in concats if n.inputs in prefixes}


def _prefixes(node: Node) -> list[tuple[int, ...]]:
    return [node.inputs[:k] for k in range(1, len(node.inputs))]
