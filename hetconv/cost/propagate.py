"""How a model runs under a plan: every operator through its rule, with all that moves
for it, in order. Pure.
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
Transfers = tuple[tuple[Rounds, int], ...]  # (rounds, bytes per element)
RUNNING_STATS_EXCHANGE = "running statistics"


@dataclass(frozen=True, eq=False)
class ScheduledOp:
    """One operator under a plan: how it runs and what moves for it. ``hides``: halos
    travel while it computes.

    ``of_all``: it stands for what ranks tell each other of all operators, whose own
    costs leave it out.
    """

    node: Node
    split: Split
    sharding: OpSharding
    forward: Transfers
    backward: Transfers
    overlaps_halos: bool
    is_stats_exchange: bool = False


Schedule = tuple[list[ScheduledOp], Transfers]
"""Every operator in order, and the sums of parameter gradients."""


class Propagator:
    """Walks of one model, one after another: how an operator runs on inputs that lie
    alike is the same object in all.

    What is known is looked up by the identity of layouts, for they are long to compare,
    and keeps them.
    """

    def __init__(self, graph: Graph, world: int, mode: Mode):
        self.graph, self.world, self.mode = graph, world, mode
        self._known: dict[tuple[Hashable, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, splits: Mapping[str, Split]) -> Schedule:
        """Every operator under ``splits`` in order, and the sums of parameter
        gradients, as the runtime does them.

        A layer without a split is replicated. The last entries stand for the end of the
        forward: outputs are gathered, and what operators have to tell is told, if any
        has.
        """
        graph = self.graph
        placed = {i: self._whole(i) for i in range(len(graph.values))}
        applied: list[ScheduledOp] = []
        contributed: set[int] = set()
        tells: dict[
            int, tuple[int, ...]
        ] = {}  # by bytes of a number, how many of each rank
        memory = AliasGroups(placed)
        for node in graph.nodes:
            split = (
                splits.get(node.layer, REPLICATE)
                if node.layer is not None
                else REPLICATE
            )
            inputs = tuple(placed[i] for i in node.inputs)
            step, others = self._once(self._step, node, split, *inputs)
            shared: list[tuple[int, Layout]] = []
            if node.writes and not memory.may_write(node, step.output):
                shared = memory.replicate(node.views)
                inputs = tuple(placed[i] for i in node.inputs)
                step, others = self._once(
                    self._gathered, node, step.output.shape, *inputs
                )
            if (
                step.output.kind == "replicated"
            ):  # what shares memory with the result is whole now
                shared = shared + memory.replicate(node.views)
                placed |= {i: self._whole(i) for i in (*node.views, *node.outputs)}
            else:
                placed |= dict(zip(node.outputs, (step.output, *others), strict=False))
                memory.add(node)
            roots = tuple(i for i, _ in shared)
            applied.append(
                self._once(
                    self._applied,
                    node,
                    split,
                    roots,
                    step,
                    *inputs,
                    *(x for _, x in shared),
                )
            )
            if step.partial_grads:
                contributed |= {
                    i
                    for i in (*node.params, *node.inputs)
                    if graph.values[i].param is not None
                }
            if step.shared_stats:
                exact = _exact(graph, node)
                tells[exact] = tuple(
                    map(
                        sum,
                        zip(
                            tells.get(exact, (0,) * self.world),
                            step.shared_stats,
                            strict=True,
                        ),
                    )
                )
        applied.append(self._once(self._outputs, *(placed[i] for i in graph.outputs)))
        if tells:
            applied.append(self._once(self._told, tuple(tells.items())))
        return applied, _gradient_sums(
            graph, splits, contributed, self.world
        ) if self.mode == "train" else ()

    def _once(self, make: Callable[..., T], *given: Any) -> T:
        """What was made of these."""
        key = (
            make.__name__,
            *(id(x) if isinstance(x, Node | Layout | OpSharding) else x for x in given),
        )
        if key not in self._known:
            self._known[key] = make(*given), given
        found: T = self._known[key][0]
        return found

    def _whole(self, value: int) -> Layout:
        return Layout.replicated(self.graph.values[value].shape, self.world)

    def _step(
        self, node: Node, split: Split, *inputs: Layout
    ) -> tuple[OpSharding, list[Layout]]:
        """How an operator runs, and how its further outputs lie."""
        sharding = node.op.sharding(
            inputs or (Layout.replicated((), self.world),), split
        )
        others = (
            [s.output for s in node.op.shardings(inputs)[1:]]
            if isinstance(node.op, SplitView)
            else []
        )
        return sharding, others or [sharding.output] * (len(node.outputs) - 1)

    def _gathered(
        self, node: Node, shape: Shape, *inputs: Layout
    ) -> tuple[OpSharding, list[Layout]]:
        return Gather(shape).sharding(
            inputs or (Layout.replicated((), self.world),)
        ), []

    def _applied(
        self,
        node: Node,
        split: Split,
        roots: tuple[int, ...],
        sharding: OpSharding,
        *lay: Layout,
    ) -> ScheduledOp:
        """``lay``: how the inputs lie, and how ``roots`` did, which are gathered first."""
        inputs, lay_before = lay[: len(node.inputs)], lay[len(node.inputs) :]
        now = _applied(self.graph, node, split, sharding, inputs, self.mode)
        return replace(now, forward=(*self._gathers(roots, lay_before), *now.forward))

    def _outputs(self, *lay: Layout) -> ScheduledOp:
        node, nowhere = (
            Node("output", _NOTHING, self.graph.outputs, ()),
            Layout.replicated((), self.world),
        )
        return ScheduledOp(
            node,
            REPLICATE,
            OpSharding((), nowhere),
            self._gathers(self.graph.outputs, lay),
            (),
            False,
        )

    def _told(self, tells: tuple[tuple[int, tuple[int, ...]], ...]) -> ScheduledOp:
        moves = tuple(all_gather_uneven(counts) for _, counts in tells)
        sharding = OpSharding(
            (), Layout.replicated((), self.world), forward_moves=moves
        )
        forward = tuple(
            (move.forward, exact) for move, (exact, _) in zip(moves, tells, strict=True)
        )
        return ScheduledOp(
            Node(RUNNING_STATS_EXCHANGE, _NOTHING, (), ()),
            REPLICATE,
            sharding,
            forward,
            (),
            False,
            is_stats_exchange=True,
        )

    def _gathers(self, values: Sequence[int], lay: Sequence[Layout]) -> Transfers:
        both = zip(values, lay, strict=True)
        return tuple(
            (Move(x, self._whole(i)).forward, self.graph.values[i].itemsize)
            for i, x in both
        )


def propagate(
    graph: Graph, splits: Mapping[str, Split], world: int, mode: Mode
) -> tuple[list[ScheduledOp], Transfers]:
    """`Propagator`, of one plan."""
    return Propagator(graph, world, mode)(splits)


@dataclass(frozen=True)
class _Nothing:
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        return OpSharding((), Layout.replicated((), 1))


_NOTHING = _Nothing()


def _applied(
    graph: Graph,
    node: Node,
    split: Split,
    sharding: OpSharding,
    inputs: tuple[Layout, ...],
    mode: Mode,
) -> ScheduledOp:
    forward: list[tuple[Rounds, int]] = []
    backward: list[tuple[Rounds, int]] = []
    differentiable = mode == "train" and any(
        graph.values[i].requires_grad for i in node.outputs
    )
    for i, src, read in zip(node.inputs, inputs, sharding.input_layouts, strict=False):
        value = graph.values[i]
        if (
            isinstance(read, Layout)
            and (read.kind, read.boxes) == (src.kind, src.boxes)
        ) or value.param is not None:
            continue
        move = Move(src, read)
        forward.append((move.forward, value.itemsize))
        if value.requires_grad and differentiable:
            backward.append((move.adjoint, value.itemsize))
    if node.outputs:
        out, exact = graph.values[node.outputs[0]], _exact(graph, node)
        forward += [(move.forward, exact) for move in sharding.forward_moves]
        if out.requires_grad and mode == "train":
            backward += [(move.forward, exact) for move in sharding.backward_moves]
    hides = bool(inputs) and exchanges_halos(node.op, inputs[0], split)
    return ScheduledOp(node, split, sharding, tuple(forward), tuple(backward), hides)


def _exact(graph: Graph, node: Node) -> int:
    """Bytes of a number of an operator's statistics."""
    return max(graph.values[node.outputs[0]].itemsize, 4)


def _gradient_sums(
    graph: Graph, splits: Mapping[str, Split], used: set[int], world: int
) -> Transfers:
    """The buckets of `replicas.Scope`: parameters that are shared alike, of which the
    used ones are summed.
    """
    found = {
        i: held
        for i in graph.params
        if (held := param_shards_of(graph, i, splits, world)) is not None
    }
    trained = [
        i
        for i in graph.params
        if graph.values[i].requires_grad and (i not in found or found[i].has_overlap)
    ]
    kinds = [
        (graph.values[i].dtype, found[i].cell_holders if i in found else None)
        for i in trained
    ]
    sums: list[tuple[Rounds, int]] = []
    for bucket in buckets([prod(graph.values[i].shape) for i in trained], kinds=kinds):
        numels: dict[Ranks, int] = {}
        for i in (trained[k] for k in bucket if trained[k] in used):
            whole = OverlapCell(Box.whole(graph.values[i].shape), tuple(range(world)))
            for box, holders in found[i].cells if i in found else (whole,):
                numels[holders] = numels.get(holders, 0) + box.numel
        itemsize = graph.values[trained[bucket[0]]].itemsize
        rounds = (
            all_reduce_among(holders, numel, world)
            for holders, numel in numels.items()
            if numel
        )
        sums += [(one, itemsize) for one in rounds if one]
    return tuple(sums)


def param_shards_of(
    graph: Graph, param: int, splits: Mapping[str, Split], world: int
) -> ParamShards | None:
    """Who holds what of a parameter, by its index among the values; None if every rank
    holds the whole.
    """
    layer, _, name = str(graph.values[param].param).rpartition(".")
    if layer not in splits or layer not in graph.layers:
        return None
    held = graph.layers[layer].param_shards(splits[layer], world).get(name)
    return held if held is not None and not held.is_replicated else None
