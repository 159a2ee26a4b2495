"""Normalizations: batch, instance, group, layer, RMS and local response norm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from hetconv.sharding.conv_spec import Ints, Span
from hetconv.sharding.layout import (
    Box,
    Layout,
    Layouts,
    ReadRegion,
    Shape,
    sharded_dims,
)
from hetconv.sharding.moves import Move, all_gather, all_reduce
from hetconv.sharding.rule import OpSharding

from .base import (
    Args,
    Call,
    FollowingOperator,
    Kwargs,
    Reader,
    WeightedCall,
    arg,
    bind,
    reduce_scattered,
)


@dataclass(frozen=True)
class BatchNorm(FollowingOperator):
    """A batch norm over dimension 1.

    In training, ranks that share channels gather each other's moments. Where channels
    are sharded, only running statistics are shared.

    Attributes:
        shape: Shape of the output.
        training: Whether it normalizes by the statistics of the batch.
        tracks_stats: Whether it updates running statistics.
    """

    shape: Shape
    training: bool
    tracks_stats: bool

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        x = reduce_scattered(inputs[0])
        if x.inner_dim is None:
            return None
        if not self.training:
            return OpSharding((x,), x, partial_grads=True)
        if x.dim == 1:
            stats = tuple(2 * n for n in x.sizes) if self.tracks_stats else ()
            return OpSharding((x,), x, partial_grads=True, shared_stats=stats)
        moments = (2, self.shape[1])
        return OpSharding(
            (x,),
            x,
            forward_moves=(all_gather(moments, x.world),),
            backward_moves=(all_reduce(moments, x.world),),
        )


@dataclass(frozen=True)
class GroupNorm(FollowingOperator):
    """A group norm of (N, C, ...); an instance norm has one channel per group.

    Ranks that hold shards of the same groups exchange moments: two numbers for each
    sample and group, of shape (2, N * groups).

    Attributes:
        shape: Shape of the output.
        groups: Number of groups.
        joined_dims: Dimensions along which the convolution that reads the result fetches
            halos. If one of them is sharded, moments travel with these.
    """

    shape: Shape
    groups: int
    joined_dims: Ints = ()

    @property
    def channels(self) -> int:
        """Number of channels in a group."""
        return self.shape[1] // self.groups

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        x = reduce_scattered(inputs[0])
        if x.inner_dim is None:
            return None
        whole_groups = x.inner_dim == 1 and not any(
            box.lo[1] % self.channels for box in x.boxes
        )
        if x.inner_dim == 0 or whole_groups:
            return OpSharding((x,), x, partial_grads=True)
        if len(self.shape) == 2:
            return None
        return OpSharding(
            (x,),
            x,
            partial_grads=True,
            forward_moves=(self._gather_moments(x),),
            backward_moves=(self._reduce_moments(x),),
            joins_round=x.inner_dim in self.joined_dims,
        )

    def _gather_moments(self, x: Layout) -> Move:
        """Returns the all-gather of moments among peers, into (world, 2, N * groups)."""
        shape = (x.world, 2, self.shape[0] * self.groups)
        held, wanted = [], []
        for rank, box in enumerate(x.boxes):
            (lo, hi), peers = self._group_span(box), x.peers(rank)
            held.append(Box((rank, 0, lo), (rank + 1, 2, hi)))
            wanted.append(Box((peers.start, 0, lo), (peers.stop, 2, hi)))
        src = Layout(shape, "sharded", tuple(held))
        return Move(src, ReadRegion(shape, tuple(wanted)))

    def _reduce_moments(self, x: Layout) -> Move:
        """Returns the sum of moments over the ranks that hold shards of a sample."""
        shape = (2, self.shape[0] * self.groups)
        spans = map(self._group_span, x.boxes)
        boxes = tuple(Box((0, lo), (2, hi)) for lo, hi in spans)
        return Move(Layout(shape, "partial", boxes), ReadRegion(shape, boxes))

    def _group_span(self, box: Box) -> Span:
        """Returns the range of a box's samples among all (sample, group) pairs."""
        return box.lo[0] * self.groups, box.hi[0] * self.groups

    def shares(self, x: Layout) -> tuple[tuple[float, ...], ...]:
        """Returns, by rank and group, the fraction of a group that the rank holds.

        Args:
            x: Layout of the input.
        """
        group_numel = self.channels * prod(self.shape[2:])
        found = []
        for box in x.boxes:
            spatial = prod(box.shape[2:])
            own = []
            for lo in range(0, self.shape[1], self.channels):
                hi = min(box.hi[1], lo + self.channels)
                channels = max(hi - max(box.lo[1], lo), 0)
                own.append(channels * spatial / group_numel)
            found.append(tuple(own))
        return tuple(found)


@dataclass(frozen=True)
class LocalNorm(FollowingOperator):
    """A normalization over whole dimensions, such as a layer norm.

    Ranks call torch's own function where the input is sharded along another dimension.

    Attributes:
        shape: Shape of the output.
        dims: The dimensions over which it normalizes.
    """

    shape: Shape
    dims: tuple[int, ...]

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        x = reduce_scattered(inputs[0])
        dims = set(sharded_dims(x.shape, x.boxes))
        if x.kind != "sharded" or dims & set(self.dims):
            return None
        return OpSharding((x,), x, partial_grads=True)


@dataclass(frozen=True)
class NormCall(WeightedCall):
    """A call of a norm.

    Attributes:
        eps: Added to the variance.
    """

    eps: float = 1e-5


@dataclass(frozen=True)
class BatchNormCall(NormCall):
    """A call of a batch norm.

    Attributes:
        mean: Running mean, if it has one.
        var: Running variance, if it has one.
        momentum: Weight of a batch's statistics in the running ones.
    """

    mean: Tensor | None = None
    var: Tensor | None = None
    momentum: float = 0.1


def _read_batch_or_instance_norm(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    params: dict[str, None] = dict.fromkeys(("weight", "bias"))
    running: dict[str, None] = dict.fromkeys(("running_mean", "running_var"))
    # torch's own functions, of 9 arguments, take the weight first, those of F last.
    if len(args) + len(kwargs) == 9:
        x, weight, bias, mean, var = bind(args, kwargs, input=None, **params, **running)
    else:
        x, mean, var, weight, bias = bind(args, kwargs, input=None, **running, **params)
    shape = tuple(x.shape)
    is_batch_norm = name == "batch_norm"
    flag = "training" if is_batch_norm else "use_input_stats"
    training = bool(arg(args, kwargs, 5, flag, not is_batch_norm))
    momentum = arg(args, kwargs, 6, "momentum", 0.1)
    eps = arg(args, kwargs, 7, "eps", 1e-5)
    affine: dict[str, Any] = {"weight": weight, "bias": bias, "eps": eps}
    if training and not is_batch_norm:
        # Running statistics would be averages over samples. torch refuses a single
        # value per channel.
        single = prod(shape[2:]) == 1
        if mean is not None or len(shape) < 3 or not prod(shape) or single:
            return None
        return NormCall(GroupNorm(shape, shape[1]), (x,), **affine)
    if len(shape) < 2 or (training and prod(shape) == shape[1]):
        return None
    if not training and (mean is None or var is None):
        return None
    op = BatchNorm(shape, training, training and mean is not None)
    return BatchNormCall(op, (x,), **affine, mean=mean, var=var, momentum=momentum)


def _read_group_norm(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, groups, weight, bias, eps = bind(
        args, kwargs, input=None, num_groups=None, weight=None, bias=None, eps=1e-5
    )
    if x.dim() < 2 or not x.numel() or groups < 1 or x.shape[1] % groups:
        return None
    if x.numel() == groups:  # a single value per group, which torch refuses
        return None
    op = GroupNorm(tuple(x.shape), groups)
    return NormCall(op, (x,), weight=weight, bias=bias, eps=eps)


def _read_last_dims_norm(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    """Reads layer norm and RMS norm."""
    x, normalized, weight = bind(
        args, kwargs, input=None, normalized_shape=None, weight=None
    )
    bias = arg(args, kwargs, 3, "bias") if name == "layer_norm" else None
    if not isinstance(normalized, Iterable):
        return None
    normalized = tuple(normalized)
    count = len(normalized)
    if not count or tuple(x.shape[-count:]) != normalized or not x.numel():
        return None
    op = LocalNorm(tuple(x.shape), tuple(range(x.dim() - count, x.dim())))
    return NormCall(op, (x,), weight=weight, bias=bias)


def _read_local_response_norm(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = arg(args, kwargs, 0, "input")
    if x.dim() < 3 or not x.numel():
        return None
    return Call(LocalNorm(tuple(x.shape), (1,)), (x,))


READERS: dict[str, Reader] = {
    "batch_norm": _read_batch_or_instance_norm,
    "group_norm": _read_group_norm,
    "instance_norm": _read_batch_or_instance_norm,
    "layer_norm": _read_last_dims_norm,
    "local_response_norm": _read_local_response_norm,
    "rms_norm": _read_last_dims_norm,
}
