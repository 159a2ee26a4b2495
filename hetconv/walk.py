"""How a model runs under a plan: every operator through its rule, with all that moves for it, in order. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from .following import Pieces
from .graph import Graph, Memory, Node
from .layout import Exchange, Layout, Move, buckets, summed
from .plan import Mode
from .rules import REPLICATE, SPACE, Conv, Gather, Split, Step

Rounds = tuple[Exchange, ...]
Transfers = tuple[tuple[Rounds, int], ...]  # (rounds, bytes per element)


@dataclass(frozen=True)
class Applied:
    """One operator under a plan: how it runs and what moves for it. ``hides``: halos travel while it computes."""

    node: Node
    split: Split
    step: Step
    forward: Transfers
    backward: Transfers
    hides: bool


def walk(graph: Graph, splits: Mapping[str, Split], world: int, mode: Mode) -> tuple[list[Applied], Transfers]:
    """Every operator under ``splits`` in order, and the sums of parameter gradients, as the runtime does them.

    A layer without a split is replicated. The last entry stands for gathering the model's outputs.
    """
    placed = {i: Layout.replicated(v.shape, world) for i, v in enumerate(graph.values)}
    applied: list[Applied] = []
    contributed: set[int] = set()
    memory = Memory(placed)
    for node in graph.nodes:
        split = splits.get(node.layer, REPLICATE) if node.layer is not None else REPLICATE
        inputs = tuple(placed[i] for i in node.inputs)
        step = node.op.step(inputs or (Layout.replicated((), world),), split)
        shared: list[tuple[int, Layout]] = []
        if node.writes and not memory.may_write(node, step.output):
            shared = memory.make_whole(node.views)
            inputs = tuple(placed[i] for i in node.inputs)
            step = Gather(step.output.shape).step(inputs or (Layout.replicated((), world),))
        now = _applied(graph, node, split, step, inputs, mode)
        if step.output.kind == "replicated":  # what shares memory with the result is whole now
            shared += memory.make_whole(node.views)
            placed |= {i: Layout.replicated(graph.values[i].shape, world) for i in (*node.views, *node.outputs)}
        else:
            others = node.op.steps(inputs)[1:] if isinstance(node.op, Pieces) else (step,) * (len(node.outputs) - 1)
            placed |= dict(zip(node.outputs, (step.output, *(s.output for s in others)), strict=False))
            memory.join(node)
        first = tuple((Move(x, Layout.replicated(x.shape, world)).forward, graph.values[i].itemsize) for i, x in shared)
        applied.append(replace(now, forward=(*first, *now.forward)))
        if step.contributes:
            contributed |= {i for i in (*node.params, *node.inputs) if graph.values[i].param is not None}
    root = tuple(
        (Move(placed[i], Layout.replicated(placed[i].shape, world)).forward, graph.values[i].itemsize)
        for i in graph.outputs
    )
    whole = Node("output", _NOTHING, graph.outputs, ())
    applied.append(Applied(whole, REPLICATE, Step((), Layout.replicated((), world)), root, (), False))
    return applied, _gradient_sums(graph, splits, contributed, world) if mode == "train" else ()


@dataclass(frozen=True)
class _Nothing:
    def step(self, inputs: tuple[Layout, ...], split: Split = REPLICATE) -> Step:
        return Step((), Layout.replicated((), 1))


_NOTHING = _Nothing()


def _applied(graph: Graph, node: Node, split: Split, step: Step, inputs: tuple[Layout, ...], mode: Mode) -> Applied:
    forward: list[tuple[Rounds, int]] = []
    backward: list[tuple[Rounds, int]] = []
    differentiable = mode == "train" and any(graph.values[i].requires_grad for i in node.outputs)
    for i, src, read in zip(node.inputs, inputs, step.reads, strict=False):
        value = graph.values[i]
        if (isinstance(read, Layout) and (read.kind, read.boxes) == (src.kind, src.boxes)) or value.param is not None:
            continue
        move = Move(src, read)
        forward.append((move.forward, value.itemsize))
        if value.requires_grad and differentiable:
            backward.append((move.adjoint, value.itemsize))
    if node.outputs:
        out = graph.values[node.outputs[0]]
        exact = max(out.itemsize, 4)
        forward += [(move.forward, exact) for move in step.forward]
        if out.requires_grad and mode == "train":
            backward += [(move.forward, exact) for move in step.backward]
    hides = isinstance(node.op, Conv) and split.kind in SPACE and inputs[0].dim == node.op.dim(split.kind)
    return Applied(node, split, step, tuple(forward), tuple(backward), hides)


def _gradient_sums(graph: Graph, splits: Mapping[str, Split], used: set[int], world: int) -> Transfers:
    """The buckets of `replicas.Scope`: parameters that are not cut, by dtype, of which the used ones are summed."""
    cut = _cut_parameters(graph, splits)
    by_dtype: dict[str, list[int]] = {}
    for i in graph.params:
        value = graph.values[i]
        if value.requires_grad and value.param not in cut:
            by_dtype.setdefault(value.dtype, []).append(i)
    sums = []
    for group in by_dtype.values():
        for bucket in buckets([prod(graph.values[i].shape) for i in group]):
            numel = sum(prod(graph.values[group[k]].shape) for k in bucket if group[k] in used)
            if numel:
                sums.append((summed((numel,), world).forward, graph.values[group[0]].itemsize))
    return tuple(sums)


def _cut_parameters(graph: Graph, splits: Mapping[str, Split]) -> set[str | None]:
    cut: set[str | None] = set()
    for name, op in graph.layers.items():
        along = op.weight_cut(splits.get(name, REPLICATE))
        if along is not None:
            cut |= {f"{name}.weight"} | ({f"{name}.bias"} if along[0] == 0 else set())
    return cut
