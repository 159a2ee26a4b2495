"""make_plan: from a captured graph and a cluster profile to the plan with the least predicted step time. Pure.

The whole model is cut one way, whichever legal kind is predicted fastest, in proportions that make all devices finish
together; where one device alone is predicted fastest, the plan uses it alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .cost import LayerCost, gathers, layer_seconds, price
from .errors import PlanError, SplitError
from .fusing import followers
from .graph import Graph
from .layout import apportion
from .plan import LayerPlan, Mode, Plan, Prediction
from .profile import Axis, ClusterProfile, TunedRatio
from .rules import KINDS, REPLICATE, SPATIAL, Conv, Linear, Split, SplitKind

Splits = dict[str, Split]
ALONE = "fastest device alone"
TUNED = "tuned"
LONE: tuple[SplitKind, ...] = (
    "sample",
    "height",
    "width",
    "filter",
)  # how one device gets everything, least moved first


def balance(seconds: Sequence[Callable[[float], float]]) -> tuple[float, ...]:
    """Shares that add up to 1 and make all devices finish together; per device, non-decreasing seconds of a share.

    Bisects on the common time: each device takes the largest share that it finishes by then, so one that cannot even
    start by then gets none (Lastovetsky & Reddy, 2007).
    """
    lo, hi = 0.0, min(f(1.0) for f in seconds)
    for _ in range(50):
        mid = (lo + hi) / 2
        lo, hi = (lo, mid) if sum(_largest(f, mid) for f in seconds) >= 1 else (mid, hi)
    shares = [_largest(f, hi) for f in seconds]
    return tuple(s / sum(shares) for s in shares)


def _largest(seconds: Callable[[float], float], limit: float) -> float:
    """The largest share in [0, 1] that is done within ``limit``."""
    if seconds(1.0) <= limit:
        return 1.0
    lo, hi = 0.0, 1.0
    for _ in range(40):
        mid = (lo + hi) / 2
        lo, hi = (mid, hi) if seconds(mid) <= limit else (lo, mid)
    return lo


def make_plan(
    graph: Graph,
    profile: ClusterProfile,
    *,
    mode: Mode = "train",
    memory_limit: float | Sequence[float] | None = None,
    kinds: Sequence[SplitKind] | None = None,
) -> Plan:
    """The plan of least predicted step time within each device's memory.

    ``memory_limit``: bytes, for all devices or one each, in place of the profile's. ``kinds``: the only kinds that may
    be chosen; an operator for which none of them is legal is replicated. Raises `PlanError` if no candidate fits the
    memory, `SplitError` for a kind that is not known.
    """
    if not graph.layers:
        raise PlanError(f"{graph.model} has no convolution or linear layer that could be split")
    allowed = tuple(kinds) if kinds is not None else KINDS
    for kind in allowed:
        Split("replicate") if kind == "replicate" else Split(kind, (1,))
    limits = _limits(profile, memory_limit)
    found = candidates(graph, profile, mode, allowed)
    priced = {name: price(graph, profile, splits, mode) for name, splits in found.items()}
    for tuned in _tuned(graph, profile, mode, allowed):
        prediction, costs = priced[_tuned_name(tuned)]
        computed, _ = price(graph, profile, whole_model(graph, tuned.kind, tuned.computed_weights, allowed), mode)
        gain = min(tuned.step_s / tuned.computed_step_s, 1.0)  # measured side by side; a worse ratio is not kept
        priced[_tuned_name(tuned)] = replace(prediction, step_s=computed.step_s * gain), costs
    fitting = {n: p for n, (p, _) in priced.items() if all(m <= c for m, c in zip(p.memory_bytes, limits, strict=True))}
    if not fitting:
        least = min(priced.values(), key=lambda p: max(p[0].memory_bytes))[0].memory_bytes
        raise PlanError(f"no split fits: the leanest needs {_gb(least)} GB per device, but there are {_gb(limits)} GB")
    chosen = min(fitting, key=lambda n: (fitting[n].step_s, not n.startswith(ALONE), not n.startswith(TUNED)))
    prediction, costs = priced[chosen]
    layers = _layers(graph, profile, found[chosen], costs)
    return Plan(
        profile.names, mode, graph.model, graph.input_shapes, layers, chosen, prediction,
        _alternatives({n: p for n, (p, _) in priced.items()}), profile.estimated, profile.tiles,
        gathers(graph, found[chosen], profile.world, mode),
    )  # fmt: skip


def _layers(
    graph: Graph, profile: ClusterProfile, splits: Splits, costs: Mapping[str, LayerCost]
) -> dict[str, LayerPlan]:
    """What the plan says of every layer."""
    following, layers = followers(graph), {}
    for name, op in graph.layers.items():
        split, cost = splits[name], costs[name]
        chunks = profile.chunks_of(op.spec, split.sizes) if isinstance(op, Conv) and split.kind == "filter" else 1
        after = following.get(name, ())
        layers[name] = LayerPlan(op, split, cost.forward_s, cost.backward_s, cost.sent_bytes, after, chunks)
    return layers


def _gb(sizes: Sequence[float]) -> str:
    return ", ".join(f"{s / 1e9:.3g}" for s in sizes)


def _limits(profile: ClusterProfile, given: float | Sequence[float] | None) -> tuple[float, ...]:
    if given is None:
        return tuple(d.memory_bytes for d in profile.devices)
    limits = tuple(given) if isinstance(given, Sequence) else (given,) * profile.world
    if len(limits) != profile.world:
        raise PlanError(
            f"{len(limits)} memory limits were given for {profile.world} devices; give one for each, or one"
        )
    return limits


def _alternatives(priced: dict[str, Prediction]) -> dict[str, float]:
    """Predicted seconds of what else could be done: the best even split, a device alone that tells no other."""
    found: dict[str, float] = {}
    for name, prediction in priced.items():
        short = next((s for s in (ALONE, "even split") if name.startswith(s)), name)
        seconds = max(prediction.busy_s) if short == ALONE else prediction.step_s
        found[short] = min(seconds, found.get(short, float("inf")))
    return found


def candidates(graph: Graph, profile: ClusterProfile, mode: Mode, kinds: Sequence[SplitKind]) -> dict[str, Splits]:
    """Named whole-model candidates: each device alone, and each kind evenly, balanced, and as tuned by measurement."""
    world = profile.world
    found: dict[str, Splits] = {}
    lone = next((k for k in LONE if k in kinds), None)
    for rank, device in enumerate(profile.devices):
        if lone is not None:
            weights = tuple(float(r == rank) for r in range(world))
            found[f"{ALONE} ({rank}: {device.name})"] = whole_model(graph, lone, weights, kinds)
    for kind in kinds:
        if kind == "replicate":
            found.setdefault("replicated", dict.fromkeys(graph.layers, REPLICATE))
        elif kind != "sample" or _samples(graph) > 1:
            found[f"even split by {kind}"] = whole_model(graph, kind, (1.0,) * world, kinds)
            found[f"uneven {kind} split"] = balanced_model(graph, profile, kind, mode, kinds)
    for tuned in _tuned(graph, profile, mode, kinds):
        found[_tuned_name(tuned)] = whole_model(graph, tuned.kind, tuned.weights, kinds)
    return found or {"replicated": dict.fromkeys(graph.layers, REPLICATE)}


def _tuned(graph: Graph, profile: ClusterProfile, mode: Mode, kinds: Sequence[SplitKind]) -> list[TunedRatio]:
    """The ratios that were tuned for this very model and mode."""
    own = [t for t in profile.tuned if (t.graph, t.mode) == (graph.digest, mode)]
    return [t for t in own if t.kind in kinds and len(t.weights) == profile.world]


def _tuned_name(tuned: TunedRatio) -> str:
    return f"{TUNED} {tuned.kind} split"


def _samples(graph: Graph) -> int:
    return min(op.spec.N if isinstance(op, Conv) else op.x_shape[0] for op in graph.layers.values())


def whole_model(graph: Graph, kind: SplitKind, weights: Sequence[float], kinds: Sequence[SplitKind]) -> Splits:
    """Every layer cut by ``kind`` in these proportions where that is legal; a lone device stays alone if it may."""
    grid = tuple(weights)
    if kind in ("height", "width") and min(weights) > 0:
        grid = tuple(map(float, apportion(_grid(graph, kind), tuple(weights))))
    return {name: _split(op, kind, grid, kinds) for name, op in graph.layers.items()}


def _grid(graph: Graph, kind: SplitKind) -> int:
    """Units in which a spatial cut is counted: the coarsest map's rows if fine enough, so that all cuts align."""
    extents = [op.spec.y_shape[SPATIAL[kind]] for op in graph.layers.values() if isinstance(op, Conv)]
    return (min(extents) if min(extents) >= 32 else max(extents)) if extents else 1


def balanced_model(
    graph: Graph, profile: ClusterProfile, kind: SplitKind, mode: Mode, kinds: Sequence[SplitKind]
) -> Splits:
    """Samples and space in one proportion for the whole model, so that neighbours align; the others per layer."""
    axis: Axis = "filters" if kind in ("filter", "channel") else "pixels"
    dtype = graph.values[graph.nodes[0].outputs[0]].dtype

    def shares(ops: Sequence[Conv | Linear]) -> tuple[float, ...]:
        def seconds(rank: int) -> Callable[[float], float]:
            device, passes = profile.devices[rank], (False, True) if mode == "train" else (False,)
            known = [(layer_seconds(device, op, axis, b, dtype), n) for op, n in Counter(ops).items() for b in passes]
            return lambda x: sum(n * of_share(x) for of_share, n in known)

        return balance([seconds(rank) for rank in range(profile.world)])

    if axis == "pixels":
        convs = [op for op in graph.layers.values() if isinstance(op, Conv)]
        return whole_model(graph, kind, shares(convs or list(graph.layers.values())), kinds)
    return {name: _split(op, kind, shares([op]), kinds) for name, op in graph.layers.items()}


def _split(op: Conv | Linear, kind: SplitKind, weights: Sequence[float], kinds: Sequence[SplitKind]) -> Split:
    """``op`` cut by ``kind``, or replicated where that is not legal."""
    world = len(weights)
    lone = sum(w > 0 for w in weights) == 1
    if isinstance(op, Linear) and op.dim(kind) is None and lone and "sample" in kinds and kind in ("height", "width"):
        kind = "sample"  # the device that works alone goes on alone
    extent = _extent(op, kind)
    if extent is None or extent < 1:
        return REPLICATE
    try:
        split = Split(kind, apportion(extent, tuple(weights), _granularity(op, kind, extent, world)))
        op.check(split, world)
    except SplitError:
        return REPLICATE
    return split


def _extent(op: Conv | Linear, kind: SplitKind) -> int | None:
    if isinstance(op, Conv):
        s = op.spec
        return {"sample": s.N, "filter": s.K, "channel": s.C, "height": s.P, "width": s.Q}[kind]
    if kind in SPATIAL:
        dim = op.dim(kind)
        return op.x_shape[dim] if dim is not None else None
    return {"filter": op.features, "channel": op.x_shape[-1]}.get(kind)


def _granularity(op: Conv | Linear, kind: SplitKind, extent: int, world: int) -> int:
    """Kernels want slices of 16 filters or channels; whole groups of channels keep groups whole."""
    if kind == "channel" and isinstance(op, Conv) and op.spec.groups > 1:
        return op.spec.C // op.spec.groups
    return 16 if kind in ("filter", "channel") and extent >= 32 * world else 1
