"""What is measured beside layers: other kinds of operators, and calls; on parts as the
runtime runs them, or alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial
from math import ceil
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hetconv import kernels
from hetconv.autotune.launch.throttle import stretched
from hetconv.comm.rank_group import RankGroup, rank_group_of
from hetconv.ops.conv import conv_case, convolution
from hetconv.runtime.het_tensor import HetTensor
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.layer_rules import Conv, Split
from hetconv.sharding.layout import Layout

from .sampling import Passes, Run, Time

CHANNELS, SIDES = (
    64,
    (4, 16, 64, 128, 256),
)  # of the images on which operators are measured
OUTGROWN = 1 << 26  # bytes, of which caches keep little
MOST_SETS = 32


def sets_of(each: int, between: int) -> int:
    """How many tensors of ``each`` so many bytes to use in turn, so that caches keep as
    little of them as in a step.

    ``between``: bytes that a step reads and writes until it comes to the same again.
    """
    return min(max(ceil(min(between, OUTGROWN) / each), 1), MOST_SETS)


@dataclass(frozen=True)
class Other:
    """A kind of operator that no plan names, on parts while all are at work, or
    ``alone`` on plain tensors.

    ``between`` and ``count`` as `subjects.Layer` has them.
    """

    kind: str
    dtype: str
    between: int = 0
    alone: bool = False
    count: int = 1

    @property
    def key(self) -> str:
        return f"{self.kind} {self.dtype}" + " alone" * self.alone

    def samples(
        self, time: Time, device: torch.device, known: Collection[float] = ()
    ) -> dict[float, Passes]:
        """By bytes read and written: those that are ``known`` already, if any are."""
        found = {}
        for side in SIDES:
            moved_bytes, run = self._run(side, device)
            if not known or moved_bytes in known:
                found[moved_bytes] = time(run)
        return found

    def _run(self, side: int, device: torch.device) -> tuple[float, Run]:
        dtype = getattr(torch, self.dtype)
        x = torch.randn((1, CHANNELS, side, side), dtype=dtype, device=device)
        x = x.to(memory_format=torch.channels_last).requires_grad_()
        weight, bias, mean, var = (
            torch.ones(CHANNELS, dtype=dtype, device=device) for _ in range(4)
        )
        weights = weight.requires_grad_(), bias.requires_grad_()
        given, compute = x if self.alone else held_alone(x, 2), KINDS[self.kind]

        def ahead() -> Tensor:
            return local(compute(given, *weights, mean, var))

        y = ahead()
        g, wanted = torch.randn_like(y), (x, *weights) if "norm" in self.kind else (x,)
        # In a step a result lies where nothing was read or written for a while, and so
        # does what backward reads of it.
        count = sets_of(y.nbytes, self.between)
        results = deque((torch.zeros_like(y) for _ in range(count)), maxlen=count)
        graphs, gradients = deque(ahead() for _ in range(count)), deque[Any](maxlen=2)

        def infer() -> None:
            with torch.no_grad():
                results.append(ahead())

        def train() -> None:
            graphs.append(ahead())
            gradients.append(torch.autograd.grad(graphs.popleft(), wanted, g))

        return float(x.nbytes + y.nbytes), Run(infer, train, both=True)


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
"""What stands for each of `cost.kind_of`: of an image, and of weight, bias, mean and
variance per channel.
"""


@dataclass(frozen=True)
class Call:
    """What the host takes for a layer beside its kernels: a small convolution on parts,
    or ``alone`` by torch.

    ``count``: how many layers a model has.
    """

    alone: bool = False
    count: int = 1

    @property
    def key(self) -> str:
        return "call" + " alone" * self.alone

    def samples(
        self, time: Time, device: torch.device, known: Collection[float] = ()
    ) -> dict[float, Passes]:
        """Under 1.0. On a GPU, where kernels do not keep the host waiting, the whole
        time of a call.
        """
        op = Conv(ConvSpec(1, 8, (8, 8), 8, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))
        s = op.spec
        x, w, g = (
            torch.randn(shape, device=device)
            for shape in (s.x_shape, s.w_shape, s.y_shape)
        )
        geometry: Any = (s.stride, s.padding, s.dilation, s.groups)
        kernels_alone = Run(
            lambda: computed(
                lambda: kernels.conv_forward(x, w, None, *geometry), device, self.alone
            ),
            lambda: computed(
                lambda: kernels.conv_backward(g, x, w, *geometry), device, self.alone
            ),
        )
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        run = (
            partial(F.conv2d, *leaves, padding=1)
            if self.alone
            else _on_a_part(op, *leaves)
        )

        def infer() -> Any:
            with torch.no_grad():
                return run()

        calls = time(
            Run(infer, lambda: torch.autograd.grad(run(), leaves, g), both=True)
        )
        if device.type == "cuda":
            return {1.0: calls}
        own = time(kernels_alone).at(calls.pulse_s)
        forward, backward = (
            [max(s - median(less), 0.0) for s in seconds]
            for seconds, less in (
                (calls.forward, own.forward),
                (calls.backward, own.backward),
            )
        )
        return {1.0: Passes(forward, backward, calls.pulse_s)}


def computed(compute: Callable[[], Any], device: torch.device, alone: bool) -> Any:
    """What a layer computes, as on parts; ``alone`` by a device as fast as it is: who
    measures makes it slow.
    """
    return compute() if alone else stretched(compute, device)


def _on_a_part(op: Conv, x: Tensor, w: Tensor) -> Callable[[], Tensor]:
    given = held_alone(x, 0)
    way = conv_case(op, given.placement, Split("sample", (len(x),)), given.group)
    return lambda: local(convolution(given, w, None, way, given.group))


def local(y: Tensor) -> Tensor:
    return y.local if isinstance(y, HetTensor) else y


def held_alone(x: Tensor, dim: int) -> HetTensor:
    """A tensor cut along ``dim`` into one part, this rank's: nothing that is done to it
    waits for another rank.
    """
    world = dist.group.WORLD
    assert world is not None
    return HetTensor.wrap(
        x, Layout.sharded(tuple(x.shape), dim, (x.shape[dim],)), _team_of_one(world)
    )


@cache
def _team_of_one(world: dist.ProcessGroup) -> RankGroup:
    """Of this rank, among the ranks of ``world``."""
    return rank_group_of(
        dist.new_group([dist.get_rank(world)], use_local_synchronization=True)
    )
