"""Operators that draw random numbers, and tensors in the shape of another one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from hetconv.sharding.layout import Layout, Layouts, Shape
from hetconv.sharding.rule import Gather, OpSharding

from .base import (
    Args,
    Call,
    FollowingOperator,
    Kwargs,
    Reader,
    arg,
    bind,
    reduce_scattered,
)
from .elementwise import read_elementwise
from .shapes import read_sizes


@dataclass(frozen=True)
class Dropout(FollowingOperator):
    """An elementwise function with random numbers.

    Attributes:
        shape: Shape of the output.
        dims: Number of leading dimensions for each entry of which a number is drawn.
            Dropout of features has 2, samples and channels; all others have every
            dimension.
    """

    shape: Shape
    dims: int

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        x = reduce_scattered(inputs[0])
        if x.inner_dim is None:
            return None
        return OpSharding((x,), x)

    def seed_rank(self, x: Layout, rank: int) -> int:
        """Returns the rank whose seed this rank uses.

        Ranks whose shards need the same numbers use the seed of the first of them.

        Args:
            x: Layout of the input.
            rank: This rank.
        """
        own_numbers = x.inner_dim is not None and x.inner_dim < self.dims
        return rank if own_numbers else x.peers(rank).start


@dataclass(frozen=True)
class Like(FollowingOperator):
    """A tensor in the shape of another one, whose values are not read.

    Attributes:
        shape: Shape of the output.
    """

    shape: Shape

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        """Returns how the operator runs; see `Operator`. Nothing is sent."""
        x = reduce_scattered(inputs[0])
        if x.kind != "sharded":
            return None
        return OpSharding(inputs, x)


@dataclass(frozen=True)
class NoiseLike(Like):
    """Random numbers in the shape of another tensor."""


FEATURE_DROPOUT_RANKS = {
    "dropout1d": 3,
    "dropout2d": 4,
    "dropout3d": 5,
    "feature_dropout": 0,
    "feature_alpha_dropout": 0,
}
"""Dropouts of whole channels, and the rank of a batch of inputs; 0 for any."""
DROPOUT = frozenset({"alpha_dropout", "dropout", *FEATURE_DROPOUT_RANKS})
NOISE = frozenset({"bernoulli", "exponential", "normal", "uniform"})


def _read_dropout(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, p = bind(args, kwargs, input=None, p=0.5)
    if not (arg(args, kwargs, 2, "training", kwargs.get("train", True)) and p):
        return read_elementwise(name, args, kwargs)
    if not 0 <= p <= 1:
        return None
    if name not in FEATURE_DROPOUT_RANKS:
        return Call(Dropout(tuple(x.shape), x.dim()), (x,))
    # Of other ranks torch refuses the input or takes dimension 0 for the channels.
    if x.dim() < 2 or FEATURE_DROPOUT_RANKS[name] not in (0, x.dim()):
        return None
    return Call(Dropout(tuple(x.shape), 2), (x,))


def _read_rrelu(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    training = arg(args, kwargs, 3, "training", False)
    read = _read_noise if training else read_elementwise
    return read(name, args, kwargs)


def _read_noise(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    """Reads noise with the parameters of one distribution for all elements.

    A generator that is given is in the same state on every rank, so that all draw the
    whole tensor.
    """
    x = arg(args, kwargs, 0, "input")
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if kwargs.get("generator") is not None or len(tensors) != 1 or tensors[0] is not x:
        return None
    return Call(Dropout(tuple(x.shape), x.dim()), (x,))


def _read_noise_like(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    if kwargs.get("device") is not None or kwargs.get("generator") is not None:
        return None
    call = _read_like(name, args, kwargs)
    if call is None:
        return None
    return replace(call, op=NoiseLike(tuple(call.inputs[0].shape)))


def _read_like(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = arg(args, kwargs, 0, "input")
    if not isinstance(x, Tensor) or kwargs.get("requires_grad"):
        return None
    return Call(Like(tuple(x.shape)), (x,))


def _read_new(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    """Reads a new replicated tensor, which has the dtype and device of its source."""
    shape = read_sizes(args[:2] if name == "new_full" else args, kwargs, "size")
    return Call(Gather(shape), ()) if shape is not None else None


READERS: dict[str, Reader] = {
    **dict.fromkeys(DROPOUT, _read_dropout),
    **dict.fromkeys(NOISE, _read_noise),
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), _read_noise_like),
    "rrelu": _read_rrelu,
    **dict.fromkeys(("empty_like", "full_like", "ones_like", "zeros_like"), _read_like),
    **dict.fromkeys(("new_empty", "new_full", "new_ones", "new_zeros"), _read_new),
}
