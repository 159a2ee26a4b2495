"""Calls that draw random numbers."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hetconv.operators import Drawn, NoiseLike

from .base import Args, Call, Kwargs, Reader, arg
from .creation import like
from .pointwise import elementwise

FEATURES = {"dropout1d": 3, "dropout2d": 4, "dropout3d": 5, "feature_dropout": 0, "feature_alpha_dropout": 0}
"""Dropouts of whole (sample, channel) maps, with the number of dimensions of a batch; 0 for any."""
DROPOUT = frozenset({"alpha_dropout", "dropout", *FEATURES})
NOISE = frozenset({"bernoulli", "exponential", "normal", "uniform"})


def _dropout(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, p = arg(args, kwargs, 0, "input"), arg(args, kwargs, 1, "p", 0.5)
    if not (arg(args, kwargs, 2, "training", kwargs.get("train", True)) and p):
        return elementwise(name, args, kwargs)
    features = name in FEATURES
    if not 0 <= p <= 1 or (features and (x.dim() < 2 or x.dim() != (FEATURES[name] or x.dim()))):
        return None  # torch refuses it, or takes the first dimension for the channels: let it
    return Call(Drawn(tuple(x.shape), 2 if features else x.dim()), (x,))


def _rrelu(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    return (_noise if arg(args, kwargs, 3, "training", False) else elementwise)(name, args, kwargs)


def _noise(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    """Of one tensor and numbers. A generator that is given is in the same state on every rank: all draw the whole."""
    x = arg(args, kwargs, 0, "input")
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if kwargs.get("generator") is not None or len(tensors) != 1 or tensors[0] is not x:
        return None
    return Call(Drawn(tuple(x.shape), x.dim()), (x,))


def _noise_like(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    call = like(name, args, kwargs)
    if call is None or any(kwargs.get(option) is not None for option in ("device", "generator")):
        return None
    return replace(call, op=NoiseLike(tuple(call.inputs[0].shape)))


READERS: dict[str, Reader] = {
    **dict.fromkeys(DROPOUT, _dropout),
    **dict.fromkeys(NOISE, _noise),
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), _noise_like),
    "rrelu": _rrelu,
}
