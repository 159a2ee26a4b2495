"""Operators that draw random numbers: dropout, noise."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from hetconv.sharding.layer_rules import REPLICATE, Gather, OpSharding, Split
from hetconv.sharding.layout import Layout, Shape

from .base import Args, Call, Kwargs, Reader, arg, reduce_scattered
from .elementwise import elementwise
from .shapes import sizes_of


@dataclass(frozen=True)
class Dropout:
    """Elementwise, with a random number for each entry of the first ``dims`` dimensions
    and all that lies in it.

    Dropout of features draws for samples and channels, every other one for single numbers.
    """

    shape: Shape
    dims: int

    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x = reduce_scattered(inputs[0])
        if x.kind != "sharded" or x.inner_dim is None:
            return Gather(self.shape).sharding(inputs)
        return OpSharding((x,), x)

    def seed_rank(self, x: Layout, rank: int) -> int:
        """The first of the ranks whose parts have the same numbers as this one's:
        itself where each needs its own.
        """
        apart = x.inner_dim is not None and x.inner_dim < self.dims
        return rank if apart else x.peers(rank).start


@dataclass(frozen=True)
class Like:
    """A tensor in the shape of another one, whose values are not read: it is cut alike,
    and nothing moves.
    """

    shape: Shape

    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x = reduce_scattered(inputs[0])
        return (
            OpSharding(inputs, x)
            if x.kind == "sharded"
            else Gather(self.shape).sharding(inputs)
        )


@dataclass(frozen=True)
class NoiseLike(Like):
    """Random numbers in the shape of another tensor."""


FEATURES = {
    "dropout1d": 3,
    "dropout2d": 4,
    "dropout3d": 5,
    "feature_dropout": 0,
    "feature_alpha_dropout": 0,
}
"""Dropouts of whole (sample, channel) maps, with the number of dimensions of a batch; 0 for any."""
DROPOUT = frozenset({"alpha_dropout", "dropout", *FEATURES})
NOISE = frozenset({"bernoulli", "exponential", "normal", "uniform"})


def _dropout(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, p = arg(args, kwargs, 0, "input"), arg(args, kwargs, 1, "p", 0.5)
    if not (arg(args, kwargs, 2, "training", kwargs.get("train", True)) and p):
        return elementwise(name, args, kwargs)
    features = name in FEATURES
    if not 0 <= p <= 1 or (
        features and (x.dim() < 2 or x.dim() != (FEATURES[name] or x.dim()))
    ):
        return None  # torch refuses it, or takes the first dimension for the channels: let it
    return Call(Dropout(tuple(x.shape), 2 if features else x.dim()), (x,))


def _rrelu(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    return (_noise if arg(args, kwargs, 3, "training", False) else elementwise)(
        name, args, kwargs
    )


def _noise(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    """Of one tensor and numbers. A generator that is given is in the same state on
    every rank: all draw the whole.
    """
    x = arg(args, kwargs, 0, "input")
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if kwargs.get("generator") is not None or len(tensors) != 1 or tensors[0] is not x:
        return None
    return Call(Dropout(tuple(x.shape), x.dim()), (x,))


def _noise_like(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    call = like(name, args, kwargs)
    if call is None or any(
        kwargs.get(option) is not None for option in ("device", "generator")
    ):
        return None
    return replace(call, op=NoiseLike(tuple(call.inputs[0].shape)))


def like(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = arg(args, kwargs, 0, "input")
    return (
        Call(Like(tuple(x.shape)), (x,))
        if isinstance(x, Tensor) and not kwargs.get("requires_grad")
        else None
    )


def _new(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    """A tensor of any shape: replicated, and of its source it takes only the dtype and
    the device.
    """
    shape = sizes_of(args[:2] if name == "new_full" else args, kwargs, "size")
    return Call(Gather(shape), ()) if shape is not None else None


READERS: dict[str, Reader] = {
    **dict.fromkeys(DROPOUT, _dropout),
    **dict.fromkeys(NOISE, _noise),
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), _noise_like),
    "rrelu": _rrelu,
    **dict.fromkeys(("empty_like", "full_like", "ones_like", "zeros_like"), like),
    **dict.fromkeys(("new_empty", "new_full", "new_ones", "new_zeros"), _new),
}
