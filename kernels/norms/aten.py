"""The passes of norms by ATen.

On a CPU, operators that broadcast a number per channel do not use vector instructions,
and `torch.var_mean` takes ten times as long as ATen's kernels of batch and group norm.
There, all passes are made of these kernels: the channels of all samples are those of
one sample if memory is contiguous, and samples are read one by one if it is
channels-last.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from hetconv.kernels.memory_formats import CHANNELS_LAST

BATCH_NORM_OUT = torch.ops.aten.native_batch_norm.out
BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward
ONLY_SUMS = [False, True, True]


def moments(x: Tensor, exact: torch.dtype, groups: int) -> Tensor:
    """Returns (2, N, G): variance and mean of each sample's groups of channels.

    Args:
        x: (N, C, ...), not empty.
        exact: Data type of the result.
        groups: G, which divides C.
    """
    N, C = x.shape[:2]
    if not x.is_cpu:
        of_groups = x.to(exact).reshape(N, groups, -1)
        return torch.stack(torch.var_mean(of_groups, 2, correction=0))
    x, size = as_images(x), x.numel() // (N * C)
    if x.is_contiguous():
        # Its weight makes the results exact.
        weight = _stats(C, exact)[1]
        given = (x, weight, None, N, C, size, groups, 0.0)
        _, mean, invstd = torch.native_group_norm(*given)
        return torch.stack((invstd.pow_(-2), mean))
    # Of channels-last images, group norm subtracts the square of the mean from the mean
    # of squares, in single precision.
    mean, var = _of_channels_of_samples(x, exact)
    if groups == C:
        return torch.stack((var, mean))
    var, mean = (t.view(N, groups, -1) for t in (var, mean))
    among_channels, mean = torch.var_mean(mean, 2, correction=0)
    return torch.stack((var.mean(2).add_(among_channels), mean))


def moments_of_channels(x: Tensor, exact: torch.dtype) -> Tensor:
    """Returns (2, C): variance and mean of each channel over all samples."""
    if x.is_cpu and x.is_contiguous():
        var, mean = moments(x, exact, x.shape[1])
        among_samples, mean = torch.var_mean(mean, 0, correction=0)
        return torch.stack((var.mean(0) + among_samples, mean))
    if x.is_cpu:
        mean, var = _of_channels(x, exact)
    else:
        mean, var = torch.batch_norm_update_stats(x.to(exact), None, None, 0.0)
    return torch.stack((var, mean))


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Returns x * scale + shift in the data type of x, on a CPU.

    Args:
        x: (N, C, ...).
        scale: (N, C), or (1, C) for all samples, in float32 at least.
        shift: Likewise.
    """
    return normalized(
        x, *_stats(x.shape[1], scale.dtype, len(scale)), scale, shift, 0.0
    )


def normalized(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Returns (x - mean) / sqrt(var + eps) * weight + bias in the data type of x.

    Args:
        x: (N, C, ...).
        mean: (N, C), or (1, C) for all samples, in float32 at least.
        var: Likewise.
        weight: (C,), or like ``mean``, or None.
        bias: Likewise.
        eps: Added to the variance.
    """
    x = as_images(x)
    if not x.numel():
        return x.clone()
    y = torch.empty_like(x)
    normalize_to(y, x, mean, var, weight, bias, eps)
    return y


def normalize_to(
    y: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> None:
    """Writes `normalized` x to y.

    Args:
        y: (N, C, ...), in the data type of x; it may be x itself. It is fastest if each
            sample is dense in the memory format of x.
        x: In one of both memory formats.
        mean: As for `normalized`, like the other arguments.
        var: Likewise.
        weight: Likewise.
        bias: Likewise.
        eps: Likewise.
    """
    weight, bias = (p.to(mean.dtype) if p is not None else p for p in (weight, bias))
    if not x.is_cpu:
        scale = (var + eps).rsqrt_()
        scale = scale if weight is None else scale * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        y.copy_(torch.addcmul(_on(shift, x), x, _on(scale, x)))
        return
    if len(mean) == 1 and (len(x) == 1 or _is_dense(y)):
        _normalize_to(y, x, _first(weight), _first(bias), mean[0], var[0], eps)
        return
    mean, var = mean.expand(x.shape[:2]), var.expand(x.shape[:2])
    weight, bias = (p.expand_as(mean) if p is not None else p for p in (weight, bias))
    if x.is_contiguous() and y.is_contiguous():
        weight, bias = (p.flatten() if p is not None else p for p in (weight, bias))
        stats, rows = (mean.flatten(), var.flatten()), (_rows(y)[None], _rows(x)[None])
        _normalize_to(*rows, weight, bias, *stats, eps)
        return
    for n, each in enumerate(zip(y.split(1), x.split(1), strict=True)):
        a, b = (p[n] if p is not None else p for p in (weight, bias))
        _normalize_to(*each, a, b, mean[n], var[n], eps)


def sums(g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """Returns (2, N, C): sums of g times the normalized x, and of g."""
    if not x.is_cpu:
        dims = list(range(2, x.dim()))
        g = g.to(mean.dtype)
        centred = (x.to(mean.dtype) - _on(mean, x)) * _on(invstd, x)
        return torch.stack(((g * centred).sum(dims), g.sum(dims)))
    x = as_images(x)
    g = in_format_of(x, g)
    if x.is_contiguous():
        stats = mean.flatten(), invstd.flatten()
        return torch.stack(_sums(_rows(g)[None], _rows(x)[None], *stats)).view(
            2, *mean.shape
        )
    if len(x) == 1:
        return torch.stack(_sums(g, x, mean[0], invstd[0]))[:, None]
    of_samples = zip(g.split(1), x.split(1), mean, invstd, strict=True)
    return torch.stack([torch.stack(_sums(*each)) for each in of_samples], 1)


def sums_of_channels(g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """Returns (2, C): sums of g times the normalized x, and of g, over all samples."""
    if x.is_cpu:
        return torch.stack(_sums(g, x, mean, invstd))
    # There native_batch_norm_backward needs running statistics.
    total, centred, _, _ = torch.batch_norm_backward_reduce(
        g, x, mean, invstd, None, True, False, False
    )
    return torch.stack([centred * invstd, total])


def combination(
    x: Tensor, g: Tensor, of_x: Tensor, of_g: Tensor, shift: Tensor
) -> Tensor:
    """Returns x * of_x + g * of_g + shift in the data type of x.

    The numbers are (N, C), or (1, C) for all samples.
    """
    if not x.is_cpu:
        y = torch.addcmul(_on(shift, x), x, _on(of_x, x))
        return y.addcmul_(g, _on(of_g, x)).to(x.dtype)
    x = as_images(x)
    if not x.numel():
        return x.clone()
    g = in_format_of(x, g)
    if x.dtype != shift.dtype:  # one sample at a time in single precision
        y = torch.empty_like(x)
        for n in range(len(x)):
            one = (x[n : n + 1].to(shift.dtype), g[n : n + 1].to(shift.dtype))
            numbers = (t[n : n + 1] if len(t) > 1 else t for t in (of_x, of_g, shift))
            y[n : n + 1] = combination(*one, *numbers)
        return y
    if x.is_contiguous():
        of_x, of_g, shift = (t.expand(x.shape[:2]) for t in (of_x, of_g, shift))
        y = affine(x, of_x, shift)
        _rows(y).addcmul_(_rows(g), of_g.reshape(-1, 1))
        return y
    # Numbers for a whole row of pixels, so that inner loops are long and contiguous.
    of_x, of_g, shift = (t.repeat(1, x.shape[-1])[:, None] for t in (of_x, of_g, shift))
    y = torch.empty_like(x)
    torch.addcmul(shift, _lines(x), of_x, out=_lines(y)).addcmul_(_lines(g), of_g)
    return y


def memory_format(x: Tensor) -> torch.memory_format:
    """Returns channels-last for images that are, and else the contiguous format."""
    last = CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
    return last if x.is_contiguous(memory_format=last) else torch.contiguous_format


def as_images(x: Tensor) -> Tensor:
    """Returns x in the one or the other memory format."""
    return x.contiguous(memory_format=memory_format(x))


def _is_dense(x: Tensor) -> bool:
    """Returns whether x has one of both memory formats."""
    return x.is_contiguous(memory_format=memory_format(x))


def in_format_of(x: Tensor, g: Tensor) -> Tensor:
    """Returns g in the memory format of x, which has one of both.

    If that is channels-last, each sample is.
    """
    if x.is_contiguous():
        return g.contiguous()
    memory = CHANNELS_LAST[x.dim()]
    if g[:1].is_contiguous(memory_format=memory):
        return g
    return g.contiguous(memory_format=memory)


def _of_channels_of_samples(x: Tensor, exact: torch.dtype) -> Iterable[Tensor]:
    """Returns mean and variance (N, C) of the channels of each sample."""
    if len(x) == 1:
        return (t[None] for t in _of_channels(x, exact))
    each = [torch.stack(_of_channels(one, exact)) for one in x.split(1)]
    return torch.stack(each, 1)


def _of_channels(x: Tensor, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns mean and variance (C) of channels over all samples."""
    if x.dtype == exact:
        return torch.batch_norm_update_stats(x, None, None, 0.0)
    # Running statistics of this data type make the results exact. Nothing is added.
    running = torch.zeros(x.shape[1], dtype=exact, device="cpu")
    mean, var = torch.batch_norm_update_stats(x, running, running.clone(), 0.0)
    return mean, var


def _normalize_to(
    y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
) -> None:
    """Computes a batch norm of given statistics; they and the parameters are (C,)."""
    unused = _stats(0, mean.dtype)[0]
    made = {"out": y, "save_mean": unused, "save_invstd": unused}
    BATCH_NORM_OUT(x, weight, bias, mean, var, False, 0.0, eps, **made)


def _first(p: Tensor | None) -> Tensor | None:
    """Returns (C,) of (C,) or (1, C)."""
    return p[0] if p is not None and p.dim() == 2 else p


def _sums(g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, of (N, C, ...), the sums (C) of g times the normalized x, and of g."""
    # The kernel reads statistics as if they were contiguous.
    stats = (None, None, mean.contiguous(), invstd.contiguous())
    ones = _stats(x.shape[1], mean.dtype)[1]
    _, along, total = BATCH_NORM_BACKWARD(g, x, ones, *stats, True, 0.0, ONLY_SUMS)
    return along, total


@lru_cache(256)
def _stats(
    channels: int, dtype: torch.dtype, samples: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns mean 0 and variance 1 of channels (C,), or (N, C), on the CPU."""
    shape = (channels,) if samples is None else (samples, channels)
    return (
        torch.zeros(shape, dtype=dtype, device="cpu"),
        torch.ones(shape, dtype=dtype, device="cpu"),
    )


def _rows(x: Tensor) -> Tensor:
    """Views x (N, C, ...), which is contiguous, as (N C, pixels)."""
    return x.view(x.shape[0] * x.shape[1], -1)


def _lines(x: Tensor) -> Tensor:
    """Views x (N, C, ..., W), which is channels-last, as (N, lines, W C)."""
    return x.movedim(1, -1).flatten(1, -3).flatten(2)


def _on(t: Tensor, like: Tensor) -> Tensor:
    """Views (N, C) so that it is broadcast over the shape of ``like``."""
    return t.view(*t.shape, *(1,) * (like.dim() - 2))
