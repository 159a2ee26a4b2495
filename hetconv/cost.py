"""What a plan costs: every operator through its rule, every movement through the geometry that performs it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from .errors import PlanError
from .following import BatchNorm, GroupNorm, Pieces, View
from .graph import Graph, Memory, Node
from .layout import Exchange, Layout, Move, buckets, summed, traffic
from .plan import Gathered, Mode, Prediction
from .profile import Axis, ClusterProfile, DeviceModel
from .rules import REPLICATE, SPATIAL, Conv, Gather, Linear, Op, Split, Step

Rounds = tuple[Exchange, ...]
Transfers = tuple[tuple[Rounds, int], ...]  # (rounds, bytes per element)
FILTER_AXIS = ("filter", "channel")


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
            others = node.op.steps(inputs)[1:] if isinstance(node.op, Pieces) else ()
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
    for i, src, read in zip(node.inputs, inputs, step.reads, strict=False):
        value = graph.values[i]
        if (isinstance(read, Layout) and (read.kind, read.boxes) == (src.kind, src.boxes)) or value.param is not None:
            continue
        move = Move(src, read)
        forward.append((move.forward, value.itemsize))
        if value.requires_grad and mode == "train":
            backward.append((move.adjoint, value.itemsize))
    if node.outputs:
        out = graph.values[node.outputs[0]]
        exact = max(out.itemsize, 4)
        forward += [(move.forward, exact) for move in step.forward]
        if out.requires_grad and mode == "train":
            backward += [(move.forward, exact) for move in step.backward]
    hides = isinstance(node.op, Conv) and SPATIAL.get(split.kind, 0) > 0 and inputs[0].dim == SPATIAL[split.kind]
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


def operator_key(op: Op, axis: Axis) -> str:
    """What a profile calls an operator measured along an axis."""
    if isinstance(op, Conv):
        s = op.spec
        shape = (
            f"{s.N}x{s.C}x{s.H}x{s.W} k{s.K} {s.R}x{s.S} s{s.stride} p{s.padding} d{s.dilation} g{s.groups} {s.dtype}"
        )
        return f"conv2d {shape} by {axis}".replace(", ", ",")
    assert isinstance(op, Linear)
    return f"linear {'x'.join(map(str, op.x_shape))} k{op.features} by {axis}"


def layer_seconds(
    device: DeviceModel, op: Conv | Linear, axis: Axis, backward: bool, dtype: str
) -> Callable[[float], float]:
    """Seconds of a layer by share: measured along this axis, or along the other, or by the roofline."""
    for key in (operator_key(op, axis), operator_key(op, "filters" if axis == "pixels" else "pixels")):
        if (model := device.operators.get(key)) is not None:
            return (model.backward if backward else model.forward).at
    if isinstance(op, Conv):
        flops, moved = op.spec.flops, op.spec.bytes
    else:
        flops, moved = 2 * prod(op.x_shape) * op.features, 4 * (prod(op.x_shape) + prod(op.y_shape) + op.features)
    return lambda share: device.roofline(flops * share, moved * share, dtype, backward)


def share_of(applied: Applied, rank: int) -> tuple[Axis, float]:
    """The share of a layer's work that a rank has under its split."""
    split, out = applied.split, applied.step.output
    if split.kind == "replicate":
        return "pixels", 1.0
    if split.kind == "channel" and out.kind == "partial":
        return "filters", split.sizes[rank] / sum(split.sizes)
    axis: Axis = "filters" if split.kind in FILTER_AXIS else "pixels"
    return axis, out.boxes[rank].numel / max(prod(out.shape), 1)


def node_seconds(graph: Graph, device: DeviceModel, applied: Applied, rank: int, backward: bool) -> float:
    """Seconds of this rank's part of an operator: measured for layers, memory-bound for all others."""
    node = applied.node
    if not node.outputs or (backward and not graph.values[node.outputs[0]].requires_grad):
        return 0.0
    if isinstance(node.op, Pieces | View):  # nothing is computed
        return 0.0
    value = graph.values[node.outputs[0]]
    if isinstance(node.op, Conv | Linear):
        axis, share = share_of(applied, rank)
        return layer_seconds(device, node.op, axis, backward, value.dtype)(share)
    numel = applied.step.output.boxes[rank].numel + sum(read.boxes[rank].numel for read in applied.step.reads)
    twice = isinstance(node.op, GroupNorm) or (isinstance(node.op, BatchNorm) and node.op.training)
    return device.roofline(0, numel * value.itemsize * (1 + twice), value.dtype, backward)


@dataclass
class _Clocks:
    """When each device is done, as movements make them wait for each other."""

    profile: ClusterProfile
    now: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now, self.busy = [0.0] * self.profile.world, [0.0] * self.profile.world

    def compute(self, seconds: Sequence[float]) -> None:
        self.now = [t + s for t, s in zip(self.now, seconds, strict=True)]
        self.busy = [b + s for b, s in zip(self.busy, seconds, strict=True)]

    def arrivals(self, transfers: Transfers) -> list[float]:
        """When every rank has what was sent to it, if all start now and do nothing else."""
        now = list(self.now)
        for rounds, itemsize in transfers:
            for one in rounds:
                start, spent_in, spent_out = list(now), [0.0] * len(now), [0.0] * len(now)
                for (s, r), size in traffic((one,), itemsize).items():
                    link = self.profile.link(s, r)
                    seconds = link.latency_s + size * link.s_per_byte
                    spent_out[s] += seconds
                    spent_in[r] += seconds
                    now[r] = max(now[r], start[s], start[r])
                now = [t + max(i, o) for t, i, o in zip(now, spent_in, spent_out, strict=True)]
        return now

    def step(self, transfers: Transfers, seconds: Sequence[float], hides: bool) -> None:
        arrived = self.arrivals(transfers)
        if not hides:
            self.now = arrived
        self.compute(seconds)
        self.now = [max(t, a) for t, a in zip(self.now, arrived, strict=True)]


@dataclass(frozen=True)
class LayerCost:
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    sent_bytes: int


def price(
    graph: Graph, profile: ClusterProfile, splits: Mapping[str, Split], mode: Mode
) -> tuple[Prediction, dict[str, LayerCost]]:
    """The predicted step under ``splits``, and the cost of every layer that a plan names.

    Raises `PlanError` for splits into another number of parts than the profile has devices.
    """
    world = profile.world
    for name, split in splits.items():
        if split.kind != "replicate" and len(split.sizes) != world:
            raise PlanError(f"{name!r} is split into {len(split.sizes)} parts, but the profile has {world} devices")
    applied, sums = walk(graph, splits, world, mode)
    clocks, layers = _Clocks(profile), {}
    sent: dict[tuple[int, int], int] = {}
    forward = [[node_seconds(graph, d, a, r, False) for r, d in enumerate(profile.devices)] for a in applied]
    backward = [[node_seconds(graph, d, a, r, True) for r, d in enumerate(profile.devices)] for a in applied]
    for a, seconds in zip(applied, forward, strict=True):
        clocks.step(a.forward, seconds, a.hides)
        _count(sent, a.forward)
    if mode == "train":
        for a, seconds in zip(reversed(applied), reversed(backward), strict=True):
            clocks.step(a.backward, seconds, a.hides)
            _count(sent, a.backward)
        clocks.step(sums, [0.0] * world, False)
        _count(sent, sums)
    for a, f, b in zip(applied, forward, backward, strict=True):
        if a.node.layer is not None:
            own: dict[tuple[int, int], int] = {}
            _count(own, a.forward + a.backward)
            layers[a.node.layer] = LayerCost(tuple(f), tuple(b) if mode == "train" else (), sum(own.values()))
    matrix = tuple(tuple(sent.get((s, r), 0) for r in range(world)) for s in range(world))
    step = max(clocks.now)
    memory = tuple(memory_bytes(graph, applied, splits, r, mode) for r in range(world))
    return Prediction(step, step - max(clocks.busy), tuple(clocks.busy), matrix, memory), layers


def gathers(graph: Graph, splits: Mapping[str, Split], world: int, mode: Mode) -> tuple[Gathered, ...]:
    """The operators, but for layers that ``splits`` replicates, that run on the whole; those that send most first."""
    found = []
    for a in walk(graph, splits, world, mode)[0]:
        sent: dict[tuple[int, int], int] = {}
        _count(sent, a.forward + a.backward)
        if a.node.layer is None and a.node.outputs and a.step.output.kind == "replicated" and sent:
            function = a.node.function or a.node.name
            found.append(Gathered(a.node.name, function, graph.values[a.node.outputs[0]].shape, sum(sent.values())))
    return tuple(sorted(found, key=lambda g: -g.sent_bytes))


def _count(sent: dict[tuple[int, int], int], transfers: Transfers) -> None:
    for rounds, itemsize in transfers:
        for pair, size in traffic(rounds, itemsize).items():
            sent[pair] = sent.get(pair, 0) + size


def memory_bytes(graph: Graph, applied: Sequence[Applied], splits: Mapping[str, Split], rank: int, mode: Mode) -> int:
    """Parameters (in training also gradients and two moments of an optimizer) and activations that live together."""
    parts = {f"{n}.weight": c[1][rank] / max(sum(c[1]), 1) for n, op in graph.layers.items()
             if (c := op.weight_cut(splits.get(n, REPLICATE))) is not None}  # fmt: skip
    held = sum(
        prod(graph.values[i].shape) * graph.values[i].itemsize * parts.get(str(graph.values[i].param), 1.0)
        for i in graph.params
    )
    per_node = [
        a.step.output.boxes[rank].numel * graph.values[a.node.outputs[0]].itemsize
        for a in applied
        if a.node.outputs and not a.node.views
    ]
    alive = sum(per_node) if mode == "train" else 2 * max(per_node, default=0)
    return int(held * (4 if mode == "train" else 1) + alive)
