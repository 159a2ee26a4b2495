"""Seconds of operators on devices, and bytes that they hold there, at any share. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np

from .following import BatchNorm, ConvTranspose, GroupNorm, Pieces, View
from .graph import Graph, Node
from .network import Array
from .plan import Mode
from .profile import Axis, Curve, DeviceModel
from .rules import REPLICATE, Conv, Linear, Op, Split, SplitKind, Step
from .walk import Applied


def operator_key(op: Op, axis: Axis) -> str:
    """What a profile calls an operator measured along an axis."""
    if isinstance(op, Conv):
        s = op.spec
        x, kernel = ("x".join(map(str, n)) for n in (s.x_shape, s.kernel))
        said = f"{x} k{s.K} {kernel} s{s.stride} p{s.padding} d{s.dilation} g{s.groups} {s.dtype} by {axis}"
        return f"conv{s.spatial_dims}d {said}".replace(", ", ",")
    assert isinstance(op, Linear)
    return f"linear {'x'.join(map(str, op.x_shape))} k{op.features} by {axis}"


def arithmetic(op: Op, dtype: str) -> str:
    """The dtype by whose rate an operator runs: torch computes convolutions of float32, no linears, in TF32."""
    return "tf32" if dtype == "float32" and isinstance(op, Conv | ConvTranspose) else dtype


def layer_curve(device: DeviceModel, op: Conv | Linear, axis: Axis, backward: bool, dtype: str) -> Curve:
    """Seconds of a layer by share: measured along this axis, or along the other, or by the roofline."""
    for key in (operator_key(op, axis), operator_key(op, "filters" if axis == "pixels" else "pixels")):
        if (model := device.operators.get(key)) is not None:
            return model.backward if backward else model.forward
    if isinstance(op, Conv):
        flops, moved = op.spec.flops, op.spec.bytes
    else:
        flops, moved = 2 * prod(op.x_shape) * op.features, 4 * (prod(op.x_shape) + prod(op.y_shape) + op.features)
    shares = 0.5, 1.0  # a roofline is a straight line, above what a call costs
    return Curve(shares, tuple(device.roofline(flops * x, moved * x, arithmetic(op, dtype), backward) for x in shares))


def axis_of(kind: SplitKind) -> Axis:
    """What a share of a layer is a share of, under such a split."""
    return "filters" if kind in ("filter", "channel") else "pixels"


def shares_of(split: Split, step: Step) -> list[float]:
    """The shares of a layer's work that the ranks have under its split."""
    out = step.output
    if out.kind == "partial":
        return [size / sum(split.sizes) for size in split.sizes]
    return [box.numel / max(prod(out.shape), 1) for box in out.boxes]


class Operators:
    """Seconds that the operators of a graph take on each device; what a layer takes by share is looked up once."""

    def __init__(self, graph: Graph, devices: Sequence[DeviceModel]):
        self.graph, self.devices = graph, devices
        self._layers: dict[tuple[Op, Axis, bool, str], list[Callable[[float], float]]] = {}

    def seconds(self, node: Node, split: Split, step: Step, backward: bool) -> Array:
        """(P,): measured for layers; nearly all others are bound by memory. Backward is of what has a gradient."""
        if not node.outputs or isinstance(node.op, Pieces | View):  # nothing is computed
            return np.zeros(len(self.devices))
        value = self.graph.values[node.outputs[0]]
        if backward and not value.requires_grad:
            return np.zeros(len(self.devices))
        if isinstance(node.op, Conv | Linear):
            by_share = self.layer(node.op, axis_of(split.kind), backward, value.dtype)
            return np.array([f(share) for f, share in zip(by_share, shares_of(split, step), strict=True)])
        twice = isinstance(node.op, GroupNorm) or (isinstance(node.op, BatchNorm) and node.op.training)
        size = value.itemsize * (1 + twice)
        found = []
        for rank, device in enumerate(self.devices):
            numel = step.output.boxes[rank].numel + sum(read.boxes[rank].numel for read in step.reads)
            flops = node.op.flops(step.reads[0].boxes[rank].numel) if isinstance(node.op, ConvTranspose) else 0
            found.append(device.roofline(flops, numel * size, arithmetic(node.op, value.dtype), backward))
        return np.array(found)

    def layer(self, op: Conv | Linear, axis: Axis, backward: bool, dtype: str) -> list[Callable[[float], float]]:
        """Seconds of a layer by share, for each device."""
        key = op, axis, backward, dtype
        if key not in self._layers:
            self._layers[key] = [layer_curve(d, op, axis, backward, dtype).at for d in self.devices]
        return self._layers[key]


def result_bytes(graph: Graph, node: Node, step: Step) -> list[int]:
    """Bytes of what an operator leaves in memory on each rank; a view leaves nothing."""
    if not node.outputs or node.views:
        return [0] * step.output.world
    return [box.numel * graph.values[node.outputs[0]].itemsize for box in step.output.boxes]


def parameter_bytes(
    graph: Graph, splits: Mapping[str, Split], world: int, mode: Mode, layer: str | None
) -> list[float]:
    """Bytes on each rank of a layer's parameters, or of all that no layer has.

    In training each counts four times: with its gradient and two moments of an optimizer.
    """
    op = graph.layers.get(layer) if layer is not None else None
    along = op.weight_cut(splits.get(str(layer), REPLICATE)) if op is not None else None
    cut = () if along is None else ("weight", "bias") if along[0] == 0 else ("weight",)
    times = 4 if mode == "train" else 1
    owned = graph.owned.get(layer, {})
    part = times * sum(size for name, size in owned.items() if name in cut)
    whole = times * sum(owned.values()) - part
    shares = [size / max(sum(along[1]), 1) for size in along[1]] if along is not None else [0.0] * world
    return [whole + part * share for share in shares]


def memory_bytes(graph: Graph, applied: Sequence[Applied], splits: Mapping[str, Split], mode: Mode) -> tuple[int, ...]:
    """Bytes on each rank: parameters, and the results that live together, in inference the two largest in a row."""
    world = applied[0].step.output.world
    per_node = [result_bytes(graph, a.node, a.step) for a in applied[:-1]]
    held = [
        sum(sizes)
        for sizes in zip(
            *(parameter_bytes(graph, splits, world, mode, layer) for layer in (None, *graph.layers)), strict=True
        )
    ]
    by_rank = list(zip(*per_node, strict=True)) or [(0,)] * world
    alive = [sum(sizes) if mode == "train" else 2 * max(sizes) for sizes in by_rank]
    return tuple(int(h + a) for h, a in zip(held, alive, strict=True))
