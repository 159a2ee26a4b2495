"""The ways of splitting that the planner chooses among: of every layer, and of whole models to compare with. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .balancing import added, balance, balanced_sizes
from .cost import axis_of, layer_curve
from .errors import SplitError
from .graph import Graph
from .layout import apportion
from .plan import Mode
from .profile import Axis, ClusterProfile, Curve, TunedRatio
from .rules import KINDS, REPLICATE, SPACE, Conv, Linear, Split, SplitKind

Splits = dict[str, Split]
Weights = tuple[float, ...]
ALONE = "fastest device alone"
EVEN = "even split"
TUNED = "tuned"
PAIRS = "uneven filter and channel split"
LONE: tuple[SplitKind, ...] = ("sample", "depth", "height", "width", "filter")  # for one device: least moved first


class Candidates:
    """For one model, mode and cluster, of the kinds that are allowed."""

    def __init__(self, graph: Graph, profile: ClusterProfile, mode: Mode, kinds: Sequence[SplitKind] = KINDS):
        self.graph, self.profile, self.mode, self.kinds = graph, profile, mode, tuple(kinds)
        self._dtypes = {n.layer: graph.values[n.outputs[0]].dtype for n in graph.nodes if n.layer is not None}
        self._curves: dict[tuple[Conv | Linear, Axis], list[Curve]] = {}

    def curves(self, name: str, axis: Axis) -> list[Curve]:
        """Seconds of a layer by share on each device, all passes together."""
        op = self.graph.layers[name]
        if (op, axis) not in self._curves:
            passes = (False, True) if self.mode == "train" else (False,)
            self._curves[op, axis] = [
                added((layer_curve(d, op, axis, b, self._dtypes[name]), 1) for b in passes)
                for d in self.profile.devices
            ]
        return self._curves[op, axis]

    def model_curves(self, axis: Axis) -> list[Curve]:
        """Of all convolutions together, or of all layers where there is none."""
        layers = self.graph.layers
        names = [n for n, op in layers.items() if isinstance(op, Conv)] or list(layers)
        first = {layers[n]: n for n in reversed(names)}
        count = Counter(layers[n] for n in names)
        each = [(self.curves(first[op], axis), n) for op, n in count.items()]
        return [added((curves[d], n) for curves, n in each) for d in range(self.profile.world)]

    def pool(self, *, even: bool = False) -> list[Weights]:
        """Proportions that all layers share, so that neighbours align: of the fastest device, two, four, ... and all.

        Balanced over the whole model, or even.
        """
        curves, world = self.model_curves("pixels"), self.profile.world
        order = sorted(range(world), key=lambda d: (curves[d].at(1.0), d))
        groups = [*(order[: 1 << i] for i in range(world.bit_length()) if 1 << i < world), order]
        found: list[Weights] = []
        for group in groups:
            shares = [1.0] * len(group) if even else balance([curves[d] for d in group])
            by_device = dict(zip(group, shares, strict=True))
            found.append(tuple(by_device.get(d, 0.0) for d in range(world)))
        return list(dict.fromkeys(found))

    def choices(self, pool: Sequence[Weights], *, own: bool = True) -> dict[str, tuple[Split, ...]]:
        """Of each layer: every kind in every proportion of the pool and, if ``own``, in those that suit it best.

        Equal layers get the same object.
        """
        known: dict[Conv | Linear, tuple[Split, ...]] = {}
        cuts = {k: [aligned(self.graph, k, weights) for weights in pool] for k in self.kinds if k != "replicate"}
        for name, op in self.graph.layers.items():
            if op not in known:
                found: list[Split] = []
                for kind, grids in cuts.items():
                    found += [split_of(op, kind, grid, self.kinds) for grid in grids]
                    found += [self._suited(name, op, kind)] if own else []
                legal = [s for s in dict.fromkeys(found) if s.kind != "replicate"]
                whole = [REPLICATE] if "replicate" in self.kinds or not legal else []
                known[op] = (*whole, *legal)
        return {name: known[op] for name, op in self.graph.layers.items()}

    def _suited(self, name: str, op: Conv | Linear, kind: SplitKind) -> Split:
        extent = _extent(op, kind)
        if extent is None or extent < 1:
            return REPLICATE
        grain = _granularity(op, kind, extent, self.profile.world)
        return _checked(op, kind, balanced_sizes(self.curves(name, axis_of(kind)), extent, grain), self.profile.world)

    def whole_models(self, limits: Sequence[float] = ()) -> dict[str, Splits]:
        """What a plan is compared with: each device alone, and each kind evenly, balanced, and as it was tuned.

        Of equal devices with equal ``limits``, bytes of memory, only the first one is alone.
        """
        world = self.profile.world
        found: dict[str, Splits] = {}
        lone = next((k for k in LONE if k in self.kinds and (k not in SPACE or _is_there(self.graph, k))), None)
        known = [(device, limits[rank] if limits else None) for rank, device in enumerate(self.profile.devices)]
        for rank, device in enumerate(self.profile.devices):
            if lone is not None and known.index(known[rank]) == rank:
                weights = tuple(float(r == rank) for r in range(world))
                found[f"{ALONE} ({rank}: {device.name})"] = self.whole(lone, weights)
        for kind in self.kinds:
            if kind == "replicate":
                found.setdefault("replicated", dict.fromkeys(self.graph.layers, REPLICATE))
            elif _is_there(self.graph, kind):
                found[f"{EVEN} by {kind}"] = self.whole(kind, (1.0,) * world)
                found[f"uneven {kind} split"] = self.balanced(kind)
        if {"filter", "channel"} <= set(self.kinds):
            found[PAIRS] = self._pairs()
        for tuned in self.tuned():
            found[tuned_name(tuned)] = self.whole(tuned.kind, tuned.weights)
        return found or {"replicated": dict.fromkeys(self.graph.layers, REPLICATE)}

    def whole(self, kind: SplitKind, weights: Sequence[float]) -> Splits:
        return whole_model(self.graph, kind, weights, self.kinds)

    def balanced(self, kind: SplitKind) -> Splits:
        """Samples and space in one proportion for the whole model, so that neighbours align; the others per layer."""
        if kind in ("filter", "channel"):
            return {name: self._suited(name, op, kind) for name, op in self.graph.layers.items()}
        return self.whole(kind, balance(self.model_curves("pixels")))

    def _pairs(self) -> Splits:
        """As Moreno-Alvarez et al. (2021): by filter, and by channel what reads the result of such a layer."""
        chosen: Splits = {}
        source: dict[int, str] = {}
        for node in self.graph.nodes:
            before = next((source[i] for i in node.inputs if i in source), None)
            if node.layer is not None:
                after_filter = before is not None and chosen[before].kind == "filter"
                op = self.graph.layers[node.layer]
                split = self._suited(node.layer, op, "channel" if after_filter else "filter")
                chosen.setdefault(node.layer, split)
                before = node.layer
            if before is not None:
                source |= dict.fromkeys(node.outputs, before)
        return chosen

    def tuned(self) -> list[TunedRatio]:
        """The ratios that were tuned for this very model and mode."""
        own = [t for t in self.profile.tuned if (t.graph, t.mode) == (self.graph.digest, self.mode)]
        return [t for t in own if t.kind in self.kinds and len(t.weights) == self.profile.world]


def tuned_name(tuned: TunedRatio) -> str:
    return f"{TUNED} {tuned.kind} split"


def _is_there(graph: Graph, kind: SplitKind) -> bool:
    """Whether there is more than one sample; whether any layer has this spatial dimension."""
    ops = graph.layers.values()
    if kind == "sample":
        return min(op.spec.N if isinstance(op, Conv) else op.x_shape[0] for op in ops) > 1
    return kind not in SPACE or any(op.dim(kind) is not None for op in ops)


def whole_model(graph: Graph, kind: SplitKind, weights: Sequence[float], kinds: Sequence[SplitKind]) -> Splits:
    """Every layer cut by ``kind`` in these proportions where that is legal; a lone device stays alone if it may."""
    grid = aligned(graph, kind, tuple(weights))
    return {name: split_of(op, kind, grid, kinds) for name, op in graph.layers.items()}


def aligned(graph: Graph, kind: SplitKind, weights: Weights) -> Weights:
    """In space in units of which every cut of the model is a whole number."""
    if kind not in SPACE or min(weights) <= 0:
        return weights
    return tuple(map(float, apportion(_grid(graph, kind), weights)))


def _grid(graph: Graph, kind: SplitKind) -> int:
    """Units in which a spatial cut is counted: the coarsest map's rows if fine enough, so that all cuts align."""
    convs = [op for op in graph.layers.values() if isinstance(op, Conv)]
    extents = [op.spec.y_shape[dim] for op in convs if (dim := op.dim(kind)) is not None]
    return (min(extents) if min(extents) >= 32 else max(extents)) if extents else 1


def split_of(op: Conv | Linear, kind: SplitKind, weights: Sequence[float], kinds: Sequence[SplitKind]) -> Split:
    """``op`` cut by ``kind``, or replicated where that is not legal."""
    world = len(weights)
    lone = sum(w > 0 for w in weights) == 1
    if kind in SPACE and op.dim(kind) is None and lone and "sample" in kinds:
        kind = "sample"  # the device that works alone goes on alone
    extent = _extent(op, kind)
    if extent is None or extent < 1:
        return REPLICATE
    return _checked(op, kind, apportion(extent, tuple(weights), _granularity(op, kind, extent, world)), world)


def _checked(op: Conv | Linear, kind: SplitKind, sizes: tuple[int, ...], world: int) -> Split:
    try:
        split = Split(kind, sizes)
        op.check(split, world)
    except SplitError:
        return REPLICATE
    return split


def _extent(op: Conv | Linear, kind: SplitKind) -> int | None:
    dim = op.dim(kind)
    if isinstance(op, Conv):
        s = op.spec
        return s.y_shape[dim] if dim is not None else {"filter": s.K, "channel": s.C}.get(kind)
    return op.x_shape[dim] if dim is not None else {"filter": op.features, "channel": op.x_shape[-1]}.get(kind)


def _granularity(op: Conv | Linear, kind: SplitKind, extent: int, world: int) -> int:
    """Kernels want slices of 16 filters or channels; whole groups of channels keep groups whole."""
    if kind == "channel" and isinstance(op, Conv) and op.spec.groups > 1:
        return op.spec.C // op.spec.groups
    return 16 if kind in ("filter", "channel") and extent >= 32 * world else 1
