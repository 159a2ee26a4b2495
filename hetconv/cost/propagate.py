"""Sharding propagation: how every operator of a model runs under a plan.

Each operator's rule is applied to the layouts of its inputs, in order, and gives the
layout of its result and all that is moved for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

from hetconv.operators.views import SplitView
from hetconv.schemas.plan import Mode
from hetconv.sharding.layer_rules import exchanges_halos
from hetconv.sharding.layout import Box, Layout, Shape
from hetconv.sharding.moves import Exchange, Move, all_gather_uneven, buckets
from hetconv.sharding.param_shards import (
    OverlapCell,
    ParamShards,
    Ranks,
    all_reduce_among,
)
from hetconv.sharding.rule import Gather, OpSharding
from hetconv.sharding.split import REPLICATE, Split
from hetconv.tracing.graph import AliasGroups, Graph, Node

T = TypeVar("T")
Rounds = tuple[Exchange, ...]
Transfers = tuple[tuple[Rounds, int], ...]  # rounds, and bytes of an element
RUNNING_STATS_EXCHANGE = "running statistics"


@dataclass(frozen=True, eq=False)
class ScheduledOp:
    """Operator under a plan.

    Attributes:
        node: Operator.
        split: Its split.
        sharding: How it runs.
        forward: Transfers of the forward pass.
        backward: Transfers of the backward pass.
        overlaps_halos: Whether halos travel while it computes.
        is_stats_exchange: Whether it is the exchange of running statistics, which is
            one for all operators and not part of their own costs.
    """

    node: Node
    split: Split
    sharding: OpSharding
    forward: Transfers
    backward: Transfers
    overlaps_halos: bool
    is_stats_exchange: bool = False

    def transfers(self, backward: bool) -> Transfers:
        """Returns the transfers of a pass."""
        return self.backward if backward else self.forward

    def of_inputs(self, backward: bool) -> Transfers:
        """Returns the transfers of a pass without statistics, which come last."""
        sharding, transfers = self.sharding, self.transfers(backward)
        moves = sharding.backward_moves if backward else sharding.forward_moves
        return transfers[: len(transfers) - len(moves)]

    def waits_for(self, backward: bool) -> Transfers:
        """Returns the transfers of a pass that have rounds of their own.

        If statistics join the round of others, the second round that sums among more
        than two ranks take does not count either.
        """
        if self.sharding.joins_round:
            return self.of_inputs(backward)
        return self.transfers(backward)


# Every operator in order, and the sums of parameter gradients.
Schedule = tuple[list[ScheduledOp], Transfers]


class Propagator:
    """Propagates the shardings of several plans through one model.

    An operator that runs on equal layouts is the same object in all schedules. Results
    are found by the identity of layouts, which take long to compare.

    Args:
        graph: Model.
        world: Number of ranks.
        mode: Whether a step trains.
    """

    def __init__(self, graph: Graph, world: int, mode: Mode):
        self.graph, self.world, self.mode = graph, world, mode
        self._known: dict[tuple[Hashable, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, splits: Mapping[str, Split]) -> Schedule:
        """Schedules every operator as the runtime runs it.

        The last entries stand for the end of the forward pass: outputs are gathered,
        and running statistics exchanged, if there are any.

        Args:
            splits: Split of each layer; a layer without one is replicated.

        Returns:
            Every operator in order, and the sums of parameter gradients.
        """
        graph = self.graph
        layouts = {i: self._whole(i) for i in range(len(graph.values))}
        aliases = AliasGroups(layouts)
        scheduled: list[ScheduledOp] = []
        partial: set[int] = set()  # parameters whose gradients are partial
        stats: dict[int, tuple[int, ...]] = {}  # numbers per rank, by bytes of each
        for node in graph.nodes:
            split = REPLICATE
            if node.layer is not None:
                split = splits.get(node.layer, REPLICATE)
            op = self._schedule(node, split, layouts, aliases)
            scheduled.append(op)
            if op.sharding.partial_grads:
                used = (*node.params, *node.inputs)
                partial |= {i for i in used if graph.values[i].param is not None}
            if own_stats := op.sharding.shared_stats:
                itemsize = _stats_itemsize(graph, node)
                before = stats.get(itemsize, (0,) * self.world)
                stats[itemsize] = tuple(map(sum, zip(before, own_stats, strict=True)))
        outputs = [layouts[i] for i in graph.outputs]
        scheduled.append(self._once(self._gather_outputs, *outputs))
        if stats:
            scheduled.append(self._once(self._exchange_stats, tuple(stats.items())))
        if self.mode != "train":
            return scheduled, ()
        return scheduled, _gradient_sums(graph, splits, partial, self.world)

    def _schedule(
        self, node: Node, split: Split, layouts: dict[int, Layout], aliases: AliasGroups
    ) -> ScheduledOp:
        """Schedules one operator, and updates the layouts."""
        inputs = tuple(layouts[i] for i in node.inputs)
        sharding, outputs = self._once(self._run, node, split, *inputs)
        gathered: list[tuple[int, Layout]] = []
        if node.writes and not aliases.may_write(node, sharding.output):
            gathered += aliases.replicate(node.views)
            inputs = tuple(layouts[i] for i in node.inputs)
            shape = sharding.output.shape
            sharding, outputs = self._once(self._run_gathered, node, shape, *inputs)
        if sharding.output.kind == "replicated":
            # What shares memory with the result is replicated from now on.
            gathered += aliases.replicate(node.views)
            layouts |= {i: self._whole(i) for i in (*node.views, *node.outputs)}
        else:
            layouts |= zip(node.outputs, outputs, strict=False)
            aliases.add(node)
        roots = tuple(i for i, _ in gathered)
        before = (layout for _, layout in gathered)
        return self._once(
            self._scheduled, node, split, roots, sharding, *inputs, *before
        )

    def _once(self, make: Callable[..., T], *args: Any) -> T:
        """Returns what was made of these arguments before, or makes it."""
        ids = (id(x) if isinstance(x, Node | Layout | OpSharding) else x for x in args)
        key = (make.__name__, *ids)
        if key not in self._known:
            # The arguments are kept alive, so that no other object gets their ids.
            self._known[key] = make(*args), args
        found: T = self._known[key][0]
        return found

    def _whole(self, value: int) -> Layout:
        return Layout.replicated(self.graph.values[value].shape, self.world)

    def _scalar(self) -> Layout:
        return Layout.replicated((), self.world)

    def _run(
        self, node: Node, split: Split, *inputs: Layout
    ) -> tuple[OpSharding, list[Layout]]:
        """Applies an operator's rule; returns the layouts of its outputs too."""
        sharding = node.op.sharding(inputs or (self._scalar(),), split)
        if isinstance(node.op, SplitView):
            pieces = node.op.shardings(inputs)
            return sharding, [sharding.output, *(s.output for s in pieces[1:])]
        return sharding, [sharding.output] * len(node.outputs)

    def _run_gathered(
        self, node: Node, shape: Shape, *inputs: Layout
    ) -> tuple[OpSharding, list[Layout]]:
        return Gather(shape).sharding(inputs or (self._scalar(),)), []

    def _scheduled(
        self,
        node: Node,
        split: Split,
        roots: tuple[int, ...],
        sharding: OpSharding,
        *layouts: Layout,
    ) -> ScheduledOp:
        """Schedules an operator after the gathers that it needs.

        Args:
            node: Operator.
            split: Its split.
            roots: Values that are gathered first.
            sharding: How it runs.
            layouts: Layouts of its inputs, then those of ``roots``.
        """
        count = len(node.inputs)
        inputs, root_layouts = layouts[:count], layouts[count:]
        op = _scheduled_op(self.graph, node, split, sharding, inputs, self.mode)
        return replace(op, forward=(*self._gathers(roots, root_layouts), *op.forward))

    def _gather_outputs(self, *layouts: Layout) -> ScheduledOp:
        outputs = self.graph.outputs
        sharding = OpSharding((), self._scalar())
        node = Node("output", _NO_OPERATOR, outputs, ())
        forward = self._gathers(outputs, layouts)
        return ScheduledOp(node, REPLICATE, sharding, forward, (), False)

    def _exchange_stats(
        self, counts_by_itemsize: tuple[tuple[int, tuple[int, ...]], ...]
    ) -> ScheduledOp:
        moves, forward = [], []
        for itemsize, counts in counts_by_itemsize:
            move = all_gather_uneven(counts)
            moves.append(move)
            forward.append((move.forward, itemsize))
        sharding = OpSharding((), self._scalar(), forward_moves=tuple(moves))
        node = Node(RUNNING_STATS_EXCHANGE, _NO_OPERATOR, (), ())
        return ScheduledOp(
            node, REPLICATE, sharding, tuple(forward), (), False, is_stats_exchange=True
        )

    def _gathers(self, values: Sequence[int], layouts: Sequence[Layout]) -> Transfers:
        return tuple(
            (Move(layout, self._whole(i)).forward, self.graph.values[i].itemsize)
            for i, layout in zip(values, layouts, strict=True)
        )


def propagate(
    graph: Graph, splits: Mapping[str, Split], world: int, mode: Mode
) -> Schedule:
    """Propagates the shardings of one plan; see `Propagator`.

    Args:
        graph: Model.
        splits: Split of each layer; a layer without one is replicated.
        world: Number of ranks.
        mode: Whether a step trains.
    """
    return Propagator(graph, world, mode)(splits)


@dataclass(frozen=True)
class _NoOperator:
    """Stands for what is no operator of the model."""

    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        return OpSharding((), Layout.replicated((), 1))


_NO_OPERATOR = _NoOperator()


def _scheduled_op(
    graph: Graph,
    node: Node,
    split: Split,
    sharding: OpSharding,
    inputs: tuple[Layout, ...],
    mode: Mode,
) -> ScheduledOp:
    forward: list[tuple[Rounds, int]] = []
    backward: list[tuple[Rounds, int]] = []
    has_gradient = any(graph.values[i].requires_grad for i in node.outputs)
    for i, src, read in zip(node.inputs, inputs, sharding.input_layouts, strict=False):
        value = graph.values[i]
        unchanged = isinstance(read, Layout) and (read.kind, read.boxes) == (
            src.kind,
            src.boxes,
        )
        if unchanged or value.param is not None:
            continue
        move = Move(src, read)
        forward.append((move.forward, value.itemsize))
        if value.requires_grad and has_gradient and mode == "train":
            backward.append((move.adjoint, value.itemsize))
    if node.outputs:
        itemsize = _stats_itemsize(graph, node)
        forward += [(move.forward, itemsize) for move in sharding.forward_moves]
        if graph.values[node.outputs[0]].requires_grad and mode == "train":
            backward += [(move.forward, itemsize) for move in sharding.backward_moves]
    overlaps = bool(inputs) and exchanges_halos(node.op, inputs[0], split)
    return ScheduledOp(node, split, sharding, tuple(forward), tuple(backward), overlaps)


def _stats_itemsize(graph: Graph, node: Node) -> int:
    """Bytes of an element of an operator's statistics, which are float32 at least."""
    return max(graph.values[node.outputs[0]].itemsize, 4)


def _gradient_sums(
    graph: Graph, splits: Mapping[str, Split], partial: set[int], world: int
) -> Transfers:
    """Sums partial gradients in the buckets of `runtime.gradient_sync`."""
    shards = {i: param_shards_of(graph, i, splits, world) for i in graph.params}
    trained = [
        i
        for i in graph.params
        if graph.values[i].requires_grad
        and ((held := shards[i]) is None or held.has_overlap)
    ]
    numels = [prod(graph.values[i].shape) for i in trained]
    kinds = [
        (graph.values[i].dtype, held.cell_holders if (held := shards[i]) else None)
        for i in trained
    ]
    sums: list[tuple[Rounds, int]] = []
    for bucket in buckets(numels, kinds=kinds):
        numel_by_holders: dict[Ranks, int] = {}
        params = [trained[k] for k in bucket]
        for i in params:
            if i in partial:
                for box, holders in _cells(graph, i, shards[i], world):
                    before = numel_by_holders.get(holders, 0)
                    numel_by_holders[holders] = before + box.numel
        itemsize = graph.values[params[0]].itemsize
        for holders, numel in numel_by_holders.items():
            if numel and (rounds := all_reduce_among(holders, numel, world)):
                sums.append((rounds, itemsize))
    return tuple(sums)


def _cells(
    graph: Graph, param: int, shards: ParamShards | None, world: int
) -> Sequence[OverlapCell]:
    """Parts of a parameter with the ranks that have each."""
    if shards is not None:
        return shards.cells
    whole = Box.whole(graph.values[param].shape)
    return (OverlapCell(whole, tuple(range(world))),)


def param_shards_of(
    graph: Graph, param: int, splits: Mapping[str, Split], world: int
) -> ParamShards | None:
    """Returns which rank holds which part of a parameter.

    Args:
        graph: Model.
        param: Index of the parameter among the values.
        splits: Split of each layer.
        world: Number of ranks.

    Returns:
        The shards; None if every rank holds the whole parameter.
    """
    layer, _, name = str(graph.values[param].param).rpartition(".")
    if layer not in splits or layer not in graph.layers:
        return None
    shards = graph.layers[layer].param_shards(splits[layer], world).get(name)
    return shards if shards is not None and not shards.is_replicated else None
