"""What is timed beside layers: kinds of operators that no plan names, and calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from math import ceil
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hetconv import kernels
from hetconv.comm.rank_group import RankGroup, rank_group_of
from hetconv.ops.conv import conv_case, convolution
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.throttle import throttled
from hetconv.sharding.conv_spec import ConvSpec, MemoryFormat
from hetconv.sharding.layer_rules import Conv
from hetconv.sharding.layout import Layout
from hetconv.sharding.split import Split

from .sampling import PassCalls, Passes, TimePasses

CHANNELS = 64
IMAGE_SIDES = (4, 16, 64, 128, 256)
CACHE_BYTES = 1 << 26  # of which caches keep little
MAX_COPIES = 32


def cold_copies(bytes_each: int, bytes_between: int) -> int:
    """Returns how many tensors to use in turn to keep them out of caches as in a step.

    Args:
        bytes_each: of one tensor.
        bytes_between: what a step reads and writes until it uses the same one again.
    """
    return min(max(ceil(min(bytes_between, CACHE_BYTES) / bytes_each), 1), MAX_COPIES)


@dataclass(frozen=True)
class NonLayerOperator:
    """A kind of operator that no plan names, on a part of an image.

    Attributes:
        kind: one of `KINDS`.
        dtype: of its input and result.
        between: bytes that a step reads and writes until it runs again.
        count: how many of them a model has.
        memory_format: of its images.
    """

    kind: str
    dtype: str
    between: int = 0
    count: int = 1
    memory_format: MemoryFormat = "channels_last"

    @property
    def key(self) -> str:
        """Its name in the records of a tuning job."""
        return f"{self.kind} {self.dtype}"

    label = key

    def samples(
        self,
        time_passes: TimePasses,
        device: torch.device,
        sizes: Collection[float] = (),
    ) -> dict[float, Passes]:
        """Times it on images of several sizes.

        Args:
            time_passes: times both passes.
            device: where it computes.
            sizes: bytes to measure at; all of `IMAGE_SIDES`, if empty.

        Returns:
            Passes by the bytes read and written.
        """
        found = {}
        for side in IMAGE_SIDES:
            moved_bytes, calls = self.calls(side, device)
            if not sizes or moved_bytes in sizes:
                found[moved_bytes] = time_passes(calls)
        return found

    def calls(self, side: int, device: torch.device) -> tuple[float, PassCalls]:
        """Returns the bytes that it reads and writes, and its passes, to be timed.

        Args:
            side: rows and columns of the image.
            device: where it computes.
        """
        dtype = getattr(torch, self.dtype)
        x = torch.randn((1, CHANNELS, side, side), dtype=dtype, device=device)
        x = kernels.in_format(x, self.memory_format).requires_grad_()
        weight, bias, mean, var = (
            torch.ones(CHANNELS, dtype=dtype, device=device) for _ in range(4)
        )
        weights = weight.requires_grad_(), bias.requires_grad_()
        part, compute = on_one_rank(x, 2), KINDS[self.kind]

        def forward() -> Tensor:
            return local(compute(part, *weights, mean, var))

        y = forward()
        dy = torch.randn_like(y)
        inputs = (x, *weights) if "norm" in self.kind else (x,)
        # In a step a result lies where nothing was read or written for a while, and so
        # does what backward reads of it.
        count = cold_copies(y.nbytes, self.between)
        results = deque((torch.zeros_like(y) for _ in range(count)), maxlen=count)
        graphs, gradients = deque(forward() for _ in range(count)), deque[Any](maxlen=2)

        def infer() -> None:
            with torch.no_grad():
                results.append(forward())

        def train() -> None:
            graphs.append(forward())
            gradients.append(torch.autograd.grad(graphs.popleft(), inputs, dy))

        moved_bytes = float(x.nbytes + y.nbytes)
        return moved_bytes, PassCalls(infer, train, includes_forward=True)


KINDS: dict[str, Callable[..., Tensor]] = {
    "elementwise": lambda x, *_: torch.relu(x),
    "batch norm": lambda x, weight, bias, mean, var: F.batch_norm(
        x, mean, var, weight, bias
    ),
    "batch norm in training": lambda x, weight, bias, mean, var: F.batch_norm(
        x, mean, var, weight, bias, True
    ),
    "group norm": lambda x, weight, bias, *_: F.group_norm(
        x, CHANNELS // 4, weight, bias
    ),
    "max pool": lambda x, *_: F.max_pool2d(x, 3, 2, 1),
    "average pool": lambda x, *_: F.avg_pool2d(x, 3, 2, 1),
    "interpolation": lambda x, *_: F.interpolate(x, scale_factor=2, mode="bilinear"),
}
"""The operator that stands for each kind of `hetconv.cost.operator_cost.kind_of`.

Called with an image, and with weight, bias, mean and variance per channel.
"""


@dataclass(frozen=True)
class DispatchOverhead:
    """What the host takes for a layer beside its kernels, by a small convolution.

    Attributes:
        count: how many layers a model has.
    """

    count: int = 1

    @property
    def key(self) -> str:
        """Its name in the records of a tuning job."""
        return "call"

    @property
    def label(self) -> str:
        """What a person reads while it is measured."""
        return "time that the host takes for a layer"

    def samples(
        self,
        time_passes: TimePasses,
        device: torch.device,
        shares: Collection[float] = (),
    ) -> dict[float, Passes]:
        """Times a call without its kernels.

        On a GPU, where kernels do not keep the host waiting, the whole call.

        Args:
            time_passes: times both passes.
            device: where it computes.
            shares: without a meaning here; there is one size.

        Returns:
            Passes under the key 1.0.
        """
        spec = ConvSpec(1, 8, (8, 8), 8, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
        x, w, dy = (
            torch.randn(shape, device=device)
            for shape in (spec.x_shape, spec.w_shape, spec.y_shape)
        )
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        layer = _layer_on_one_rank(Conv(spec), *leaves)

        def infer() -> None:
            with torch.no_grad():
                layer()

        def train() -> None:
            torch.autograd.grad(layer(), leaves, dy)

        calls = time_passes(PassCalls(infer, train, includes_forward=True))
        if device.type == "cuda":
            return {1.0: calls}
        args: Any = (spec.stride, spec.padding, spec.dilation, spec.groups)
        kernels_alone = time_passes(
            PassCalls(
                lambda: throttled(
                    lambda: kernels.conv_forward(x, w, None, *args), device
                ),
                lambda: throttled(
                    lambda: kernels.conv_backward(dy, x, w, *args), device
                ),
            )
        )
        return {
            1.0: Passes(
                _minus_median(calls.forward, kernels_alone.forward),
                _minus_median(calls.backward, kernels_alone.backward),
            )
        }


def _minus_median(seconds: list[float], part: list[float]) -> list[float]:
    return [max(s - median(part), 0.0) for s in seconds]


def _layer_on_one_rank(op: Conv, x: Tensor, w: Tensor) -> Callable[[], Tensor]:
    part = on_one_rank(x, 0)
    way = conv_case(op, part.placement, Split("sample", (len(x),)), part.group)
    return lambda: local(convolution(part, w, None, way, part.group))


def local(y: Tensor) -> Tensor:
    """Returns this rank's part of a tensor that lies on several, or the tensor itself."""
    return y.local if isinstance(y, HetTensor) else y


def on_one_rank(x: Tensor, dim: int) -> HetTensor:
    """Returns a tensor cut along ``dim`` into one part, this rank's.

    Nothing that is done to it waits for another rank.
    """
    world = dist.group.WORLD
    assert world is not None
    layout = Layout.sharded(tuple(x.shape), dim, (x.shape[dim],))
    return HetTensor.wrap(x, layout, _team_of_one(world))


@cache
def _team_of_one(world: dist.ProcessGroup) -> RankGroup:
    """Of this rank, among the ranks of ``world``."""
    return rank_group_of(
        dist.new_group([dist.get_rank(world)], use_local_synchronization=True)
    )
