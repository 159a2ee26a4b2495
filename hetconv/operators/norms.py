"""Normalizations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torch import Tensor

from hetconv.sharding.layer_rules import REPLICATE, Gather, OpSharding, Split
from hetconv.sharding.layout import (
    Box,
    Layout,
    Move,
    ReadRegion,
    Shape,
    all_gather,
    all_reduce,
)

from .base import Args, Call, Kwargs, Reader, arg, reduce_scattered, sharded_dims


@dataclass(frozen=True)
class BatchNorm:
    """Batch norm over dimension 1. In training every rank needs the statistics of all parts.

    ``tracks``: running statistics are updated, so that ranks tell each other those of
    their own channels.
    """

    shape: Shape
    training: bool
    tracks_stats: bool

    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x = reduce_scattered(inputs[0])
        if x.kind != "sharded" or x.inner_dim is None:
            return Gather(self.shape).sharding(inputs)
        channels, world = self.shape[1], x.world
        if not self.training:
            return OpSharding((x,), x, partial_grads=True)
        if x.dim == 1:
            return OpSharding(
                (x,),
                x,
                partial_grads=True,
                shared_stats=tuple(2 * n for n in x.sizes) if self.tracks_stats else (),
            )
        return OpSharding(
            (x,),
            x,
            forward_moves=(all_gather((2, channels), world),),
            backward_moves=(all_reduce((2, channels), world),),
        )


@dataclass(frozen=True)
class GroupNorm:
    """Group norm of (N, C, ...); instance norm has a channel per group. Ranks that
    share a group combine moments.
    """

    shape: Shape
    groups: int

    @property
    def channels(self) -> int:
        """The channels of a group."""
        return self.shape[1] // self.groups

    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x = reduce_scattered(inputs[0])
        if x.kind != "sharded" or x.inner_dim is None:
            return Gather(self.shape).sharding(inputs)
        if x.inner_dim == 0 or (
            x.inner_dim == 1 and not any(b.lo[1] % self.channels for b in x.boxes)
        ):
            return OpSharding((x,), x, partial_grads=True)
        if len(self.shape) == 2:
            return Gather(self.shape).sharding(inputs)
        return OpSharding(
            (x,),
            x,
            partial_grads=True,
            forward_moves=(self._from_mates(x),),
            backward_moves=(self._summed(x),),
        )

    def _from_mates(self, x: Layout) -> Move:
        """Two numbers of each sample and group, by rank, to all ranks that have parts
        of these samples.
        """
        shape, own = (
            (x.world, 2, self.shape[0] * self.groups),
            [self._spans(b) for b in x.boxes],
        )
        given = tuple(Box((r, 0, lo), (r + 1, 2, hi)) for r, (lo, hi) in enumerate(own))
        mates = [x.peers(rank) for rank in range(x.world)]
        asked = tuple(
            Box((m.start, 0, lo), (m.stop, 2, hi))
            for m, (lo, hi) in zip(mates, own, strict=True)
        )
        return Move(Layout(shape, "sharded", given), ReadRegion(shape, asked))

    def _summed(self, x: Layout) -> Move:
        """The sum of two numbers of each sample and group over the ranks that have
        parts of the sample.
        """
        shape = (2, self.shape[0] * self.groups)
        boxes = tuple(Box((0, lo), (2, hi)) for lo, hi in map(self._spans, x.boxes))
        return Move(Layout(shape, "partial", boxes), ReadRegion(shape, boxes))

    def _spans(self, box: Box) -> tuple[int, int]:
        """Which of all groups of all samples those of a box are."""
        return box.lo[0] * self.groups, box.hi[0] * self.groups

    def shares(self, x: Layout) -> tuple[tuple[float, ...], ...]:
        """By rank and group: the share of a group's elements, in any sample, that the
        rank holds.
        """
        whole = self.channels * prod(self.shape[2:])
        starts = range(0, self.shape[1], self.channels)
        return tuple(
            tuple(
                max(min(b.hi[1], c + self.channels) - max(b.lo[1], c), 0)
                * prod(b.shape[2:])
                / whole
                for c in starts
            )
            for b in x.boxes
        )


@dataclass(frozen=True)
class LocalNorm:
    """A normalization over whole ``dims``, such as layer norm: as called, where the cut
    is along another one.
    """

    shape: Shape
    dims: tuple[int, ...]

    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x = reduce_scattered(inputs[0])
        if x.kind != "sharded" or sharded_dims(x) & set(self.dims):
            return Gather(self.shape).sharding(inputs)
        return OpSharding((x,), x, partial_grads=True)


@dataclass(frozen=True)
class NormCall(Call):
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5

    @property
    def params(self) -> tuple[Tensor, ...]:
        return tuple(p for p in (self.weight, self.bias) if p is not None)


@dataclass(frozen=True)
class BatchNormCall(NormCall):
    mean: Tensor | None = None
    var: Tensor | None = None
    momentum: float = 0.1


def _tracking(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    """Batch norm and instance norm. torch's own functions, of 9 arguments, take the
    weight first, those of F last.
    """
    running, affine = ("running_mean", "running_var"), ("weight", "bias")
    order = (*affine, *running) if len(args) + len(kwargs) == 9 else (*running, *affine)
    x, *four = (arg(args, kwargs, i, n) for i, n in enumerate(("input", *order)))
    weight, bias, mean, var = four if order[0] == "weight" else (*four[2:], *four[:2])
    shape = tuple(x.shape)
    batch = name == "batch_norm"
    training = bool(
        arg(args, kwargs, 5, "training" if batch else "use_input_stats", not batch)
    )
    momentum, eps = (
        arg(args, kwargs, 6, "momentum", 0.1),
        arg(args, kwargs, 7, "eps", 1e-5),
    )
    if training and not batch:
        # Statistics of samples are averaged into the running ones; torch refuses a
        # single value per channel: let it.
        if (
            mean is not None
            or len(shape) < 3
            or not prod(shape)
            or prod(shape[2:]) == 1
        ):
            return None
        return NormCall(GroupNorm(shape, shape[1]), (x,), False, weight, bias, eps)
    if (
        len(shape) < 2
        or (training and prod(shape) == shape[1])
        or (not training and (mean is None or var is None))
    ):
        return None
    op = BatchNorm(shape, training, training and mean is not None)
    return BatchNormCall(op, (x,), False, weight, bias, eps, mean, var, momentum)


def _group_norm(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, groups, weight, bias = (
        arg(args, kwargs, i, n)
        for i, n in enumerate(("input", "num_groups", "weight", "bias"))
    )
    if (
        x.dim() < 2
        or not x.numel()
        or groups < 1
        or x.shape[1] % groups
        or x.numel() == groups
    ):
        return None  # torch refuses what does not divide and a single value per group: let it
    op = GroupNorm(tuple(x.shape), groups)
    return NormCall(op, (x,), False, weight, bias, arg(args, kwargs, 4, "eps", 1e-5))


def _last_dims(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    """Layer norm and RMS norm, over the last dimensions."""
    x, over, weight = (
        arg(args, kwargs, i, n)
        for i, n in enumerate(("input", "normalized_shape", "weight"))
    )
    bias = arg(args, kwargs, 3, "bias") if name == "layer_norm" else None
    if not isinstance(over, Iterable):
        return None
    over = tuple(over)
    if not over or tuple(x.shape[-len(over) :]) != over or not x.numel():
        return None
    op = LocalNorm(tuple(x.shape), tuple(range(x.dim() - len(over), x.dim())))
    return NormCall(op, (x,), False, weight, bias)


def _local_response(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = arg(args, kwargs, 0, "input")
    return (
        Call(LocalNorm(tuple(x.shape), (1,)), (x,))
        if x.dim() > 2 and x.numel()
        else None
    )


READERS: dict[str, Reader] = {
    "batch_norm": _tracking,
    "group_norm": _group_norm,
    "instance_norm": _tracking,
    "layer_norm": _last_dims,
    "local_response_norm": _local_response,
    "rms_norm": _last_dims,
}
