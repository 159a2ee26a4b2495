"""Seconds of operators on devices, and bytes that they hold there, at any share. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from hetconv.operators.conv_transpose import ConvTranspose
from hetconv.operators.einsum import Contraction
from hetconv.operators.norms import BatchNorm, GroupNorm
from hetconv.operators.pooling import AdaptivePool, Pool
from hetconv.operators.resampling import Interpolate
from hetconv.operators.views import SplitView, View
from hetconv.schemas.device_model import Axis, Curve, DeviceModel
from hetconv.sharding.layer_rules import Conv, Linear, concatenates_halos
from hetconv.sharding.layout import Boxes
from hetconv.sharding.rule import Operator, OpSharding
from hetconv.sharding.split import SPATIAL_KINDS, Split, SplitKind
from hetconv.tracing.graph import Graph, Node

from .network import Array

# Along filters, as along channels, a share reads its share of the weights; along
# pixels, of the input.
LIKENESS: dict[Axis, int] = {"pixels": 0, "filters": 2, "channels": 3}
# How often the weights of a halo's taps are read or written beside its computation: to
# lie in one piece, and backward, for which they do too, when their gradient is added to
# the whole one.
COPIED, COPIED_BACKWARD = 2, 5


def operator_key(op: Operator, axis: Axis, dtype: str) -> str:
    """What a profile calls an operator measured along an axis. ``dtype`` is that of its result."""
    if isinstance(op, Conv):
        s = op.spec
        x, kernel = ("x".join(map(str, n)) for n in (s.x_shape, s.kernel))
        said = (
            f"{x} k{s.K} {kernel} s{s.stride} p{s.padding} d{s.dilation} g{s.groups} "
            f"{s.dtype} by {axis}"
        )
        return f"conv{s.spatial_dims}d {said}".replace(", ", ",")
    assert isinstance(op, Linear)
    return f"linear {'x'.join(map(str, op.x_shape))} k{op.features} {dtype} by {axis}"


def kind_of(op: Operator) -> str | None:
    """Returns the kind of operator that is measured in place of one that is no layer.

    It takes as long for as many bytes.
    """
    match op:
        case Conv() | Linear() | ConvTranspose() | Contraction() | SplitView() | View():
            return None
        case BatchNorm():
            return "batch norm in training" if op.training else "batch norm"
        case GroupNorm():
            return "group norm"
        case Pool(kind="max") | AdaptivePool(kind="max"):
            return "max pool"
        case Pool() | AdaptivePool():
            return "average pool"
        case Interpolate():
            return "interpolation"
    return "elementwise"


def arithmetic(op: Operator, dtype: str) -> str:
    """Returns the dtype by whose rate an operator runs.

    torch computes convolutions of float32 in TF32, linear layers not.
    """
    return (
        "tf32" if dtype == "float32" and isinstance(op, Conv | ConvTranspose) else dtype
    )


def layer_curve(
    device: DeviceModel, op: Conv | Linear, axis: Axis, backward: bool, dtype: str
) -> Curve:
    """Returns the seconds of a layer by share.

    They were measured along the axis, or along the one most like it, or come from the
    roofline.

    Args:
        device: the device.
        op: the layer.
        axis: what a share is a share of.
        backward: whether it is the backward pass.
        dtype: of the result.
    """
    for along in sorted(
        LIKENESS, key=lambda other: abs(LIKENESS[other] - LIKENESS[axis])
    ):
        if (model := device.operators.get(operator_key(op, along, dtype))) is not None:
            return model.backward if backward else model.forward
    if isinstance(op, Conv):
        flops, moved = op.spec.flops, op.spec.bytes
    else:
        flops, moved = (
            2 * prod(op.x_shape) * op.features,
            4 * (prod(op.x_shape) + prod(op.y_shape) + op.features),
        )
    shares = 0.5, 1.0  # a roofline is a straight line, above what a call costs
    return Curve(
        shares,
        tuple(
            device.roofline(flops * x, moved * x, arithmetic(op, dtype), backward)
            for x in shares
        ),
    )


def axis_of(kind: SplitKind) -> Axis:
    """What a share of a layer is a share of, under such a split."""
    return {"filter": "filters", "channel": "channels"}.get(kind, "pixels")  # type: ignore[return-value]


def shares_of(split: Split, sharding: OpSharding) -> list[float]:
    """The shares of a layer's work that the ranks have under its split."""
    out = sharding.output
    if out.kind == "partial":
        return [*split.shares]
    return [box.numel / max(prod(out.shape), 1) for box in out.boxes]


class Seam(NamedTuple):
    """What a halo contributes to.

    Attributes:
        share: of the layer's pixels.
        taps: part of the kernel.
    """

    share: float
    taps: float


def seams_of(
    op: Conv | Linear, split: Split, sharding: OpSharding
) -> list[list[Seam]] | None:
    """By rank, what halos add to: each is a call of its own, see `ops.halo`.

    None without halos, and where they are joined to own rows. An input that is not cut
    as the layer is has none either, which is not asked here: they are counted all the
    same.
    """
    dim = op.dim(split.kind) if split.kind in SPATIAL_KINDS else None
    if dim is None or not isinstance(op, Conv) or concatenates_halos(op, split.kind):
        return None
    n, m, window = op.spec.x_shape[dim], op.spec.y_shape[dim], op.spec.windows[dim - 2]
    found = []
    for read, out in zip(
        sharding.input_layouts[0].boxes, sharding.output.boxes, strict=True
    ):
        rows, mine = (read.lo[dim], read.hi[dim]), (out.lo[dim], out.hi[dim])
        own = (
            mine[0] * n // m,
            -(-mine[1] * n // m),
        )  # the rows of the input that lie where the output does
        sides = [
            side
            for side in ((rows[0], own[0]), (own[1], rows[1]))
            if side[0] < side[1] and out.numel
        ]
        seams = [s for side in sides if (s := window.segment(side, mine)) is not None]
        samples = out.shape[0] / op.spec.N
        taps = [(s.taps[1] - s.taps[0]) / window.kernel for s in seams]
        found.append(
            [
                Seam((s.out[1] - s.out[0]) / m * samples, part)
                for s, part in zip(seams, taps, strict=True)
            ]
        )
    return found if any(found) else None


def numels(boxes: Sequence[Boxes]) -> Array:
    """(n, P): elements of each rank's box."""
    return np.array([[box.numel for box in one] for one in boxes], dtype=np.float64)


class Operators:
    """Seconds that the operators of a graph take on each device.

    What a layer takes by share is looked up once.
    """

    def __init__(self, graph: Graph, devices: Sequence[DeviceModel]):
        self.graph, self.devices = graph, devices
        self._measured = [
            rank for rank, device in enumerate(devices) if device.measured is not None
        ]
        self._layers: dict[
            tuple[Operator, Axis, bool, str], list[Callable[[float], float]]
        ] = {}
        self._bytes_per_s, self._ratio = np.array(
            [(d.bytes_per_s, d.backward_ratio) for d in devices]
        ).T
        self._rates: dict[str, Array] = {}
        self._overheads = [
            np.array([d.overhead(backward) for d in devices])
            for backward in (False, True)
        ]

    def seconds(
        self, node: Node, split: Split, sharding: OpSharding, backward: bool
    ) -> Array:
        """(P,): measured, or by the roofline, for which nearly all but layers are bound by memory.

        Backward is of what has a gradient.
        """
        found: Array = self.table(node, (split,), (sharding,), backward)[0]
        return found

    def table(
        self,
        node: Node,
        splits: Sequence[Split],
        steps: Sequence[OpSharding],
        backward: bool,
    ) -> Array:
        """(steps, P): `seconds` of many ways to run an operator."""
        nothing = np.zeros((len(steps), len(self.devices)))
        if not node.outputs or isinstance(
            node.op, SplitView | View
        ):  # nothing is computed
            return nothing
        value = self.graph.values[node.outputs[0]]
        if backward and not value.requires_grad:
            return nothing
        if isinstance(node.op, Conv | Linear):
            ways = zip(splits, steps, strict=True)
            return np.array(
                [self._layer_s(node.op, *way, backward, value.dtype) for way in ways]
            )
        twice = isinstance(node.op, GroupNorm) or (
            isinstance(node.op, BatchNorm) and node.op.training
        )
        moved = numels([s.output.boxes for s in steps])
        for k in range(len(steps[0].input_layouts)):
            moved = moved + numels([s.input_layouts[k].boxes for s in steps])
        flops = nothing
        if isinstance(node.op, ConvTranspose):
            flops = node.op.flops(1) * numels([s.input_layouts[0].boxes for s in steps])
        moved = moved * value.itemsize
        by_roofline = self._roofline(
            flops, moved * (1 + twice), arithmetic(node.op, value.dtype), backward
        )
        return self._other_s(
            f"{kind_of(node.op)} {value.dtype}", moved, backward, by_roofline
        )

    def forks(self, node: Node, steps: Sequence[OpSharding], backward: bool) -> Array:
        """Returns (shardings, P) seconds of adding gradients of results with several readers."""
        times = (
            self.graph.extra_gradients.get(node.outputs[0], 0)
            if backward and len(node.outputs) == 1
            else 0
        )
        if not times:
            return np.zeros((len(steps), len(self.devices)))
        value = self.graph.values[node.outputs[0]]
        moved = (
            3 * value.itemsize * numels([s.output.boxes for s in steps])
        )  # two are read, one is written
        by_roofline = self._roofline(0 * moved, moved, value.dtype, False)
        return times * self._other_s(
            f"elementwise {value.dtype}", moved, False, by_roofline
        )

    def _other_s(
        self, kind: str, moved: Array, backward: bool, seconds: Array
    ) -> Array:
        """Returns (n, P) seconds: as measured for this kind, or as given."""
        for rank, device in enumerate(self.devices):
            if (model := device.others.get(kind)) is not None:
                curve = model.backward if backward else model.forward
                seconds[:, rank] = [curve.at(size) for size in moved[:, rank]]
        return seconds

    def _layer_s(
        self,
        op: Conv | Linear,
        split: Split,
        sharding: OpSharding,
        backward: bool,
        dtype: str,
    ) -> list[float]:
        """By rank. Data sheets know no seams, only what was measured does."""
        by_share = self.layer(op, axis_of(split.kind), backward, dtype)
        found = [
            seconds(share)
            for seconds, share in zip(by_share, shares_of(split, sharding), strict=True)
        ]
        if self._measured and (seams := seams_of(op, split, sharding)) is not None:
            assert isinstance(op, Conv)
            copied = (
                (COPIED_BACKWARD if backward else COPIED)
                * prod(op.spec.w_shape)
                * op.spec.itemsize
            )
            for rank in self._measured:
                call_s, copying_s = (
                    self.devices[rank].overhead(backward),
                    copied / float(self._bytes_per_s[rank]),
                )
                found[rank] += sum(
                    call_s
                    + seam.taps
                    * (max(by_share[rank](seam.share) - call_s, 0.0) + copying_s)
                    for seam in seams[rank]
                )
        return [
            s * device.corrections.get(split.kind, 1.0)
            for s, device in zip(found, self.devices, strict=True)
        ]

    def _roofline(
        self, flops: Array, moved: Array, dtype: str, backward: bool
    ) -> Array:
        """(n, P): `DeviceModel.roofline` of many operators."""
        if dtype not in self._rates:
            self._rates[dtype] = np.array([d.rate(dtype) for d in self.devices])
        once = np.maximum(flops / self._rates[dtype], moved / self._bytes_per_s)
        called = (once * self._ratio if backward else once) + self._overheads[backward]
        return np.where(flops + moved > 0, called, 0.0)

    def layer(
        self, op: Conv | Linear, axis: Axis, backward: bool, dtype: str
    ) -> list[Callable[[float], float]]:
        """Seconds of a layer by share, for each device."""
        key = op, axis, backward, dtype
        if key not in self._layers:
            self._layers[key] = [
                layer_curve(d, op, axis, backward, dtype).at for d in self.devices
            ]
        return self._layers[key]
