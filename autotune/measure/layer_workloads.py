"""What is measured of a model: its layers, and what `other_workloads` has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
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
from hetconv.schemas.cluster_profile import Axis
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.layer_rules import Conv, Linear, SplitKind
from hetconv.tracing.graph import Graph

from .other_workloads import Call, Other, computed, sets_of
from .sampling import Passes, Run, Steps, Time, explored

AXES: tuple[Axis, ...] = ("pixels", "filters", "channels")
FEWEST = 16  # channels that a convolution is measured with a part of


@dataclass(frozen=True)
class Layer:
    """A layer of a plan, by share along ``axis`` while all ranks are at work, or
    ``alone`` and whole.

    ``dtype`` of its result. ``between``: bytes that a step reads and writes until it
    comes to this layer again. ``count``: how many layers of a model are like this one.
    ``cut``: of how many rows, filters or channels plans cut whole multiples.
    """

    op: Conv | Linear
    axis: Axis
    dtype: str
    bias: bool = True
    between: int = 0
    alone: bool = False
    count: int = 1
    cut: int = 1

    @property
    def key(self) -> str:
        return operator_key(self.op, self.axis, self.dtype) + " alone" * self.alone

    def samples(
        self, time: Time, device: torch.device, known: Collection[float] = ()
    ) -> dict[float, Passes]:
        """By share: those that are ``known`` already, if any are, or those that tell most."""
        extent = self.extent
        if self.alone or known:
            return {
                share: time(self.run(round(share * extent), device))
                for share in known or (1.0,)
            }
        grain = self.cut if self._cut_whole else grain_of(device)
        found = explored(
            lambda part: time(self.run(part, device)),
            extent,
            grain if grain <= extent else 1,
        )
        return {part / extent: seconds for part, seconds in found.items()}

    def steps(self, device: torch.device) -> Steps | None:
        """In which it is computed, if these are few and plans cut within them, of which
        `samples` tells nothing.
        """
        steps = Steps(self.extent, grain_of(device))
        return steps if steps.few and not self._cut_whole else None

    @property
    def _cut_whole(self) -> bool:
        """Pixels are computed one by one; of filters and channels plans may cut no less
        than some multiple.
        """
        return self.axis == "pixels" or self.cut > 1

    @property
    def extent(self) -> int:
        if isinstance(self.op, Linear):
            return _extents(self.op)[self.axis]
        s = self.op.spec
        return {"pixels": s.y_shape[2], "filters": s.K // s.groups, "channels": s.C}[
            self.axis
        ]

    def run(self, part: int, device: torch.device) -> Run:
        run = (
            self._conv(self.op.spec, part, device)
            if isinstance(self.op, Conv)
            else self._linear(part, device)
        )
        return run._replace(whole=part == self.extent)

    def _conv(self, s: ConvSpec, part: int, device: torch.device) -> Run:
        if self.axis == "pixels":
            local = of_rows(s, part)
        else:
            local = (
                replace(s, K=part * s.groups)
                if self.axis == "filters"
                else replace(s, C=part)
            )
        args = (s.stride, local.padding, s.dilation, s.groups)
        wanted = (s.C > 4, True, self.bias)  # nobody asks for the gradient of an image
        x, g, sets = self._tensors(local.x_shape, local.w_shape, local.y_shape, device)

        def forward() -> Any:
            _, w = next(sets)
            return computed(
                lambda: kernels.conv_forward(x, w, None, *args), device, self.alone
            )

        def backward() -> Any:
            x, w = next(sets)
            return computed(
                lambda: kernels.conv_backward(g, x, w, *args, wanted),
                device,
                self.alone,
            )

        return Run(forward, backward)

    def _linear(self, part: int, device: torch.device) -> Run:
        op = self.op
        assert isinstance(op, Linear)
        rows, features, inner = (_extents(op) | {self.axis: part}).values()
        x, g, sets = self._tensors(
            (rows, inner), (features, inner), (rows, features), device
        )

        def forward() -> Any:
            _, w = next(sets)
            return computed(lambda: F.linear(x, w), device, self.alone)

        def backward() -> Any:
            x, w = next(sets)
            return computed(
                lambda: (g @ w, g.t() @ x, g.sum(0) if self.bias else None),
                device,
                self.alone,
            )

        return Run(forward, backward)

    def _tensors(
        self, x: Sequence[int], w: Sequence[int], y: Sequence[int], device: torch.device
    ) -> tuple[Tensor, Tensor, Iterator[tuple[Tensor, Tensor]]]:
        """Input, output's gradient, and (input, weight) in turn from sets that caches
        cannot keep if a step's data is more than they hold: a layer finds in them what
        the one before wrote, and nothing of its own last step.
        """
        dtype = getattr(
            torch, self.op.spec.dtype if isinstance(self.op, Conv) else self.dtype
        )
        memory = kernels.CHANNELS_LAST.get(len(x), torch.contiguous_format)
        first, weight, g = (
            torch.randn(n, dtype=dtype, device=device).to(memory_format=memory)
            for n in (x, w, y)
        )
        count = sets_of(first.nbytes + weight.nbytes, self.between)
        return (
            first,
            g,
            cycle(
                [
                    (first, weight),
                    *((first.clone(), weight.clone()) for _ in range(count - 1)),
                ]
            ),
        )


def _extents(op: Linear) -> dict[Axis, int]:
    return {
        "pixels": prod(op.x_shape[:-1]),
        "filters": op.features,
        "channels": op.x_shape[-1],
    }


def of_rows(s: ConvSpec, rows: int) -> ConvSpec:
    """The convolution that gives this many output rows (of the first spatial
    dimension), padded as the whole one is.
    """
    (top, bottom), reach = s.padding[0], s.dilation[0] * (s.kernel[0] - 1) + 1
    return replace(
        s, size=(max((rows - 1) * s.stride[0] + reach - top - bottom, 1), *s.size[1:])
    )


Subject = Layer | Other | Call


def work(op: Conv | Linear) -> float:
    """Floating-point operations of the forward pass."""
    return float(
        op.spec.flops if isinstance(op, Conv) else 2 * prod(op.x_shape) * op.features
    )


def subjects_of(graph: Graph, world: int) -> list[Subject]:
    """All there is to measure of a model on so many ranks: its layers, those with the
    most work first, what else it runs, and calls.

    Equal ones are one, and their order is the same on every rank. The smallest layers
    come last: time may be short.
    """
    layers, others = Counter[tuple[Conv | Linear, str]](), Counter[tuple[str, str]]()
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
    found: list[Subject] = []
    for (op, dtype), count in sorted(
        layers.items(), key=lambda known: work(known[0][0]), reverse=True
    ):
        layer = Layer(op, AXES[0], dtype, (op, dtype) in biased, between, count=count)
        by_axis = (
            replace(layer, axis=axis, cut=_cut(op, axis, world)) for axis in axes_of(op)
        )
        found += [*by_axis, replace(layer, alone=True)]
    rest: list[Subject] = [Call(alone, layers.total()) for alone in (False, True)]
    rest += [
        Other(kind, dtype, between, alone, count)
        for (kind, dtype), count in others.items()
        for alone in (False, True)
    ]
    return [*found[:3], *rest, *found[3:]]


def grain_of(device: torch.device) -> int:
    """Filters, or channels, of which kernels compute whole multiples: as many as a
    vector of the processor holds.
    """
    return (
        8
        if device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
        else 16
    )


def axes_of(op: Conv | Linear) -> tuple[Axis, ...]:
    """Along which it is measured; channels of which there are few, or in groups, are
    taken to be like filters.
    """
    if isinstance(op, Linear):
        return AXES
    if op.spec.groups == op.spec.K > 1:  # depthwise
        return AXES[:1]
    return AXES if op.spec.groups == 1 and op.spec.C >= FEWEST else AXES[:2]


def _cut(op: Conv | Linear, axis: Axis, world: int) -> int:
    """See `Layer`."""
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
