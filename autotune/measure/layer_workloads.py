"""What is timed of a model: its layers, and what `other_workloads` has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv import kernels
from hetconv.cost.operator_cost import kind_of, operator_key
from hetconv.planner.partition import extent_of, granularity
from hetconv.runtime.throttle import throttled
from hetconv.schemas.device_model import Axis
from hetconv.sharding.conv_spec import ConvSpec, MemoryFormat
from hetconv.sharding.layer_rules import Conv, Linear
from hetconv.sharding.split import SplitKind
from hetconv.tracing.graph import Graph

from .other_workloads import DispatchOverhead, NonLayerOperator, cold_copies
from .sampling import Granularity, PassCalls, Passes, TimePasses, explore

AXES: tuple[Axis, ...] = ("pixels", "filters", "channels")
MIN_CHANNELS = 16  # of a convolution that is timed with a part of them
BothPasses = tuple[Callable[[], Any], Callable[[], Any]]


@dataclass(frozen=True)
class LayerWorkload:
    """A layer of a plan, timed at several shares of one axis.

    Attributes:
        op: the layer.
        axis: what is cut.
        dtype: of its result.
        bias: whether it has one.
        between: bytes that a step reads and writes until it runs the layer again.
        count: how many layers of the model are like this one.
        cut: rows, filters or channels of which plans cut whole multiples.
        memory_format: of its tensors.
    """

    op: Conv | Linear
    axis: Axis
    dtype: str
    bias: bool = True
    between: int = 0
    count: int = 1
    cut: int = 1
    memory_format: MemoryFormat = "channels_last"

    @property
    def key(self) -> str:
        """Its name in profiles, and in the records of a tuning job."""
        return operator_key(self.op, self.axis, self.dtype)

    @property
    def label(self) -> str:
        """What a person reads while it is measured."""
        if isinstance(self.op, Linear):
            rows, features = prod(self.op.x_shape[:-1]), self.op.x_shape[-1]
            return (
                f"linear {features} to {self.op.features}, {rows} rows, by {self.axis}"
            )
        s = self.op.spec
        kernel, image = ("x".join(map(str, n)) for n in (s.kernel, s.x_shape[2:]))
        return f"conv {kernel}, {s.C} to {s.K} channels, {image}, by {self.axis}"

    def samples(
        self,
        time_passes: TimePasses,
        device: torch.device,
        shares: Collection[float] = (),
    ) -> dict[float, Passes]:
        """Times it at some shares.

        Args:
            time_passes: times both passes.
            device: where it computes.
            shares: shares to measure at; those that tell most, if empty.

        Returns:
            Passes by share.
        """
        extent = self.extent
        if shares:
            return {
                share: time_passes(self.calls(round(share * extent), device))
                for share in shares
            }
        grain = self.cut if self._cut_in_grains else kernel_grain(device)
        by_size = explore(
            lambda size: time_passes(self.calls(size, device)),
            extent,
            grain if grain <= extent else 1,
        )
        return {size / extent: passes for size, passes in by_size.items()}

    def granularity(self, device: torch.device) -> Granularity | None:
        """Returns the steps in which its kernels compute, if plans cut within them.

        None where there are too many to be timed.
        """
        steps = Granularity(self.extent, kernel_grain(device))
        return steps if steps.fine and not self._cut_in_grains else None

    def fine_shares(self, device: torch.device) -> list[float]:
        """Returns the shares that tell its `granularity`, of which `samples` tells nothing."""
        steps = self.granularity(device)
        return [size / self.extent for size in steps.ends] if steps is not None else []

    @property
    def _cut_in_grains(self) -> bool:
        """Whether plans divide the axis only into pixels, or into multiples of ``cut``."""
        return self.axis == "pixels" or self.cut > 1

    @property
    def extent(self) -> int:
        """The whole size along its axis."""
        if isinstance(self.op, Linear):
            return _extents(self.op)[self.axis]
        spec = self.op.spec
        by_axis: dict[Axis, int] = {
            "pixels": spec.y_shape[2],
            "filters": spec.K // spec.groups,
            "channels": spec.C,
        }
        return by_axis[self.axis]

    def calls(self, size: int, device: torch.device) -> PassCalls:
        """Returns the passes of a part of the layer, to be timed.

        Args:
            size: of the part along the axis.
            device: where it computes.
        """
        if isinstance(self.op, Conv):
            forward, backward = self._convolution(self.op.spec, size, device)
        else:
            forward, backward = self._linear(self.op, size, device)
        return PassCalls(
            lambda: throttled(forward, device),
            lambda: throttled(backward, device),
            whole=size == self.extent,
        )

    def _convolution(self, s: ConvSpec, size: int, device: torch.device) -> BothPasses:
        if self.axis == "pixels":
            part = of_rows(s, size)
        elif self.axis == "filters":
            part = replace(s, K=size * s.groups)
        else:
            part = replace(s, C=size)
        args = (s.stride, part.padding, s.dilation, s.groups)
        wanted = (s.C > 4, True, self.bias)  # nobody asks for the gradient of an image
        shapes = part.x_shape, part.w_shape, part.y_shape
        x, dy, copies = self._tensors(*shapes, s.dtype, device)

        def forward() -> Any:
            _, w = next(copies)
            return kernels.conv_forward(x, w, None, *args)

        def backward() -> Any:
            x, w = next(copies)
            return kernels.conv_backward(dy, x, w, *args, wanted)

        return forward, backward

    def _linear(self, op: Linear, size: int, device: torch.device) -> BothPasses:
        rows, features, inner = (_extents(op) | {self.axis: size}).values()
        shapes = (rows, inner), (features, inner), (rows, features)
        x, dy, copies = self._tensors(*shapes, self.dtype, device)

        def forward() -> Any:
            _, w = next(copies)
            return F.linear(x, w)

        def backward() -> Any:
            x, w = next(copies)
            return dy @ w, dy.t() @ x, dy.sum(0) if self.bias else None

        return forward, backward

    def _tensors(
        self,
        x_shape: Sequence[int],
        w_shape: Sequence[int],
        y_shape: Sequence[int],
        dtype: str,
        device: torch.device,
    ) -> tuple[Tensor, Tensor, Iterator[tuple[Tensor, Tensor]]]:
        """Returns input, output gradient, and (input, weight) pairs that take turns.

        The pairs exceed the caches if the data of a step does: a layer finds there what the one
        before it wrote, and nothing of its own last step.
        """
        x, w, dy = (
            kernels.in_format(
                torch.randn(n, dtype=getattr(torch, dtype), device=device),
                self.memory_format,
            )
            for n in (x_shape, w_shape, y_shape)
        )
        count = cold_copies(x.nbytes + w.nbytes, self.between)
        others = [(x.clone(), w.clone()) for _ in range(count - 1)]
        return x, dy, cycle([(x, w), *others])


def _extents(op: Linear) -> dict[Axis, int]:
    return {
        "pixels": prod(op.x_shape[:-1]),
        "filters": op.features,
        "channels": op.x_shape[-1],
    }


def of_rows(s: ConvSpec, rows: int) -> ConvSpec:
    """Returns the convolution that gives so many output rows, padded as the whole one is.

    Rows are of the first spatial dimension.
    """
    (top, bottom), reach = s.padding[0], s.dilation[0] * (s.kernel[0] - 1) + 1
    return replace(
        s, size=(max((rows - 1) * s.stride[0] + reach - top - bottom, 1), *s.size[1:])
    )


Workload = LayerWorkload | NonLayerOperator | DispatchOverhead


def forward_flops(op: Conv | Linear) -> float:
    """Returns the floating-point operations of the forward pass."""
    if isinstance(op, Conv):
        return float(op.spec.flops)
    return float(2 * prod(op.x_shape) * op.features)


def workloads_of(
    graph: Graph,
    world: int,
    memory_format: MemoryFormat = "channels_last",
) -> list[Workload]:
    """Lists all there is to time of a model, in the same order on every rank.

    Equal layers are one. The largest come first, then everything beside layers, and the
    smallest come last: time may be short.

    Args:
        graph: the model.
        world: number of ranks, which decides where plans cut.
        memory_format: of the model and its inputs.
    """
    layers = Counter[tuple[Conv | Linear, str]]()
    others = Counter[tuple[str, str]]()
    biased = set()
    for node in graph.nodes:
        if not node.outputs:
            continue
        dtype, kind = graph.values[node.outputs[0]].dtype, kind_of(node.op)
        if isinstance(node.op, Conv | Linear) and node.layer is not None:
            layers[node.op, dtype] += 1
            if any(str(graph.values[i].param).endswith("bias") for i in node.params):
                biased.add((node.op, dtype))
        elif kind is not None and getattr(torch, dtype).is_floating_point:
            others[kind, dtype] += 1
    between = sum(_bytes(op, dtype) for op, dtype in layers)
    largest_first = sorted(layers, key=lambda key: forward_flops(key[0]), reverse=True)
    found: list[Workload] = []
    for op, dtype in largest_first:
        for axis in axes_of(op):
            layer = LayerWorkload(
                op,
                axis,
                dtype,
                bias=(op, dtype) in biased,
                between=between,
                count=layers[op, dtype],
                cut=_cut(op, axis, world),
                memory_format=memory_format,
            )
            found.append(layer)
    beside_layers: list[Workload] = [DispatchOverhead(layers.total())]
    for (kind, dtype), count in others.items():
        other = NonLayerOperator(kind, dtype, between, count, memory_format)
        beside_layers.append(other)
    return [*found[:3], *beside_layers, *found[3:]]


def kernel_grain(device: torch.device) -> int:
    """Returns of how many filters, or channels, kernels compute whole multiples.

    On a CPU these are as many as a vector of the processor holds.
    """
    return 8 if kernels.is_narrow_cpu(device) else 16


def axes_of(op: Conv | Linear) -> tuple[Axis, ...]:
    """Returns the axes along which a layer is timed.

    Channels of which there are few, or in groups, are taken to be like filters.
    """
    if isinstance(op, Linear):
        return AXES
    if op.spec.groups == op.spec.K > 1:  # depthwise
        return AXES[:1]
    return AXES if op.spec.groups == 1 and op.spec.C >= MIN_CHANNELS else AXES[:2]


def _cut(op: Conv | Linear, axis: Axis, world: int) -> int:
    """See `LayerWorkload.cut`."""
    if axis == "pixels" or (isinstance(op, Conv) and op.spec.groups > 1):
        return 1
    kind: SplitKind = "filter" if axis == "filters" else "channel"
    extent = extent_of(op, kind)
    assert extent is not None  # it has both
    return granularity(op, kind, extent, world)


def _bytes(op: Conv | Linear, dtype: str) -> int:
    if isinstance(op, Conv):
        return op.spec.bytes
    numel = prod(op.x_shape) + prod(op.y_shape) + op.features * op.x_shape[-1]
    return numel * int(getattr(torch, dtype).itemsize)
