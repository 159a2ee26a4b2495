"""The passes of norms by Triton: each reads and writes an image once.

Images lie anyhow, but for those that are cut along several dimensions: these are copied.
An epilogue is applied to the normalized image as it is written; its scale and shift are
(C,), or (N, C) of each sample. Gradients are then of the epilogue's result, and the
activation's input is computed again from x.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hetconv.kernels.epilogue import IDENTITY, Epilogue, EpilogueSpec
from hetconv.kernels.launch import LaunchSequence, StridedLayout

from .aten import as_images, in_format_of, memory_format
from .layouts import ImageLayout, as_rows_and_columns

SampleStrides = tuple[tuple[str, int], ...]
"""Strides of numbers per channel from sample to sample, by name of the parameter."""


def moments(x: Tensor, groups: int, of_all_samples: bool = False) -> Tensor:
    """Returns variance and mean (2, N, G) of groups of channels.

    Args:
        x: (N, C, ...), not empty.
        groups: G, which divides C.
        of_all_samples: Whether samples are measured together; the result is (2, 1, G).
    """
    launch = _moments(ImageLayout.of(x), groups, of_all_samples)
    if launch is None:
        return moments(as_images(x), groups, of_all_samples)
    rows = 1 if of_all_samples else len(x)
    found = x.new_empty((2, rows, groups), dtype=torch.float32)
    launch.run(x=x, moments=found)
    return found


def normalized(
    x: Tensor, mean: Tensor, var: Tensor, eps: float, epilogue: Epilogue
) -> Tensor:
    """Returns the epilogue of (x - mean) / sqrt(var + eps), in the data type of x.

    Args:
        x: (N, C, ...).
        mean: (N, C), or (1, C) for all samples, in float32.
        var: Likewise.
        eps: Added to the variance.
        epilogue: What is applied to the normalized x.
    """
    y = _empty_like(x)
    normalize_to(y, x, mean, var, eps, epilogue)
    return y


def normalize_to(
    y: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float, epilogue: Epilogue
) -> None:
    """Writes `normalized` x to y.

    Args:
        y: (N, C, ...), which may be x itself.
        x: As for `normalized`, like the other arguments.
        mean: Likewise.
        var: Likewise.
        eps: Likewise.
        epilogue: Likewise.
    """
    if not x.numel():
        return
    strides = _sample_strides(mean_stride=mean, **_numbers(epilogue))
    layouts = ImageLayout.of(x), ImageLayout.of(y), _residual(epilogue)
    launch = _normalize(*layouts, strides, _spec(epilogue), eps)
    if launch is None:
        x = as_images(x)
        y.copy_(normalized(x, mean, var, eps, _in_format_of(x, epilogue)))
        return
    mean, var = mean.contiguous(), var.contiguous()
    launch.run(x=x, y=y, mean=mean, var=var, **_contiguous(epilogue))


def sums(
    g: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    epilogue: Epilogue = IDENTITY,
    of_all_samples: bool = False,
) -> Tensor:
    """Returns (2, N, C): sums of d times the normalized x, and of d.

    d is the gradient of the activation's input.

    Args:
        g: Gradient of the result of the epilogue.
        x: (N, C, ...), not normalized.
        mean: (N, C), or (1, C) or (C,) for all samples, in float32.
        invstd: Likewise, inverse deviations.
        epilogue: What was applied to the normalized x.
        of_all_samples: Whether sums are over all samples; the result is (2, 1, C).
    """
    shape = (2, 1 if of_all_samples else len(x), x.shape[1])
    if not x.numel():
        return x.new_zeros(shape, dtype=torch.float32)
    strides = _sample_strides(mean_stride=mean, **_numbers(epilogue))
    layouts = ImageLayout.of(g), ImageLayout.of(x), _residual(epilogue)
    launch = _sums(*layouts, strides, _spec(epilogue), of_all_samples)
    if launch is None:
        x = as_images(x)
        g, epilogue = in_format_of(x, g), _in_format_of(x, epilogue)
        return sums(g, x, mean, invstd, epilogue, of_all_samples)
    mean, invstd = mean.contiguous(), invstd.contiguous()
    found = x.new_empty(shape, dtype=torch.float32)
    launch.run(g=g, x=x, mean=mean, invstd=invstd, sums=found, **_contiguous(epilogue))
    return found


def combination(
    x: Tensor,
    g: Tensor,
    factors: tuple[Tensor, Tensor, Tensor],
    normalized_by: tuple[Tensor, Tensor] | None = None,
    epilogue: Epilogue = IDENTITY,
) -> tuple[Tensor, Tensor | None]:
    """Returns x * first + d * second + third, and d if the residual needs it.

    d is the gradient of the activation's input, which is that of the residual; without
    an activation it is g.

    Args:
        x: (N, C, ...), not normalized.
        g: Gradient of the result of the epilogue.
        factors: The numbers, each (N, C), or (1, C) for all samples.
        normalized_by: Mean and inverse deviation, likewise; they are needed under an
            activation alone.
        epilogue: What was applied to the normalized x.
    """
    y = _empty_like(x)
    dr = None
    if epilogue.activation and epilogue.residual is not None:
        dr = torch.empty_like(y)
    if not y.numel():
        return y, dr
    if not epilogue.activation:
        epilogue, normalized_by = IDENTITY, None
    mean, invstd = normalized_by or factors[:2]
    strides = _sample_strides(
        factor_stride=factors[0], mean_stride=mean, **_numbers(epilogue)
    )
    layouts = (*map(ImageLayout.of, (x, g, y)), _residual(epilogue))
    launch = _combine(*layouts, strides, _spec(epilogue))
    if launch is None:
        x = as_images(x)
        g, epilogue = in_format_of(x, g), _in_format_of(x, epilogue)
        return combination(x, g, factors, normalized_by, epilogue)
    names = ("factor_x", "factor_g", "summand", "mean", "invstd")
    numbers = (t.contiguous() for t in (*factors, mean, invstd))
    given = dict(zip(names, numbers, strict=True)) | _contiguous(epilogue)
    if dr is not None:
        given["dr"] = dr
    launch.run(x=x, g=g, y=y, **given)
    return y, dr


@lru_cache(4096)
def _moments(
    x: ImageLayout, groups: int, of_all_samples: bool
) -> LaunchSequence | None:
    images = as_rows_and_columns([x], of_all_samples)
    if images is None:
        return None
    from hetconv.kernels.triton.norms.statistics import moments_launches

    return moments_launches(images[0], groups, of_all_samples)


@lru_cache(4096)
def _normalize(
    x: ImageLayout,
    y: ImageLayout,
    residual: ImageLayout | None,
    strides: SampleStrides,
    spec: EpilogueSpec,
    eps: float,
) -> LaunchSequence | None:
    found = _with_residual([x, y], residual, not _per_sample(strides), spec)
    if found is None:
        return None
    from hetconv.kernels.triton.norms.elementwise import normalize_launch

    (of_x, of_y), spec = found
    launch = normalize_launch(of_x, of_y, dict(strides), spec, eps)
    return LaunchSequence((launch,))


@lru_cache(4096)
def _sums(
    g: ImageLayout,
    x: ImageLayout,
    residual: ImageLayout | None,
    strides: SampleStrides,
    spec: EpilogueSpec,
    of_all_samples: bool,
) -> LaunchSequence | None:
    samples_alike = of_all_samples and not _per_sample(strides)
    found = _with_residual([g, x], residual, samples_alike, spec)
    if found is None:
        return None
    from hetconv.kernels.triton.norms.statistics import sums_launches

    (of_g, of_x), spec = found
    return sums_launches(of_g, of_x, dict(strides), of_all_samples, spec)


@lru_cache(4096)
def _combine(
    x: ImageLayout,
    g: ImageLayout,
    y: ImageLayout,
    residual: ImageLayout | None,
    strides: SampleStrides,
    spec: EpilogueSpec,
) -> LaunchSequence | None:
    found = _with_residual([x, g, y], residual, not _per_sample(strides), spec)
    if found is None:
        return None
    from hetconv.kernels.triton.norms.elementwise import combine_launch

    (of_x, of_g, of_y), spec = found
    return LaunchSequence((combine_launch(of_x, of_g, of_y, dict(strides), spec),))


def _with_residual(
    images: list[ImageLayout],
    residual: ImageLayout | None,
    samples_alike: bool,
    spec: EpilogueSpec,
) -> tuple[list[StridedLayout], EpilogueSpec] | None:
    """Returns layouts as kernels take them, that of the residual within the epilogue."""
    if residual is None:
        found = as_rows_and_columns(images, samples_alike)
        return None if found is None else (found, spec)
    found = as_rows_and_columns([*images, residual], samples_alike)
    return None if found is None else (found[:-1], spec._replace(residual=found[-1]))


def _sample_strides(**numbers: Tensor | None) -> SampleStrides:
    """Returns strides from sample to sample of contiguous numbers: 0 where these are (C,)."""
    return tuple(
        (name, t.shape[1] if t is not None and t.dim() == 2 and len(t) > 1 else 0)
        for name, t in numbers.items()
    )


def _per_sample(strides: SampleStrides) -> bool:
    """Returns whether samples have numbers of their own."""
    return any(stride for _, stride in strides)


def _numbers(epilogue: Epilogue) -> dict[str, Tensor | None]:
    return {"scale_stride": epilogue.scale, "shift_stride": epilogue.shift}


def _spec(epilogue: Epilogue) -> EpilogueSpec:
    """Returns the epilogue without its tensors, the residual among these."""
    return epilogue._replace(residual=None).spec


def _residual(epilogue: Epilogue) -> ImageLayout | None:
    return None if epilogue.residual is None else ImageLayout.of(epilogue.residual)


def _contiguous(epilogue: Epilogue) -> dict[str, Tensor]:
    """Returns the tensors of an epilogue by name, contiguous but for the residual."""
    return {
        name: t if name == "residual" else t.contiguous()
        for name, t in epilogue.tensors.items()
    }


def _in_format_of(x: Tensor, epilogue: Epilogue) -> Epilogue:
    if epilogue.residual is None:
        return epilogue
    return epilogue._replace(residual=in_format_of(x, epilogue.residual))


def _empty_like(x: Tensor) -> Tensor:
    """Returns a new dense image in the memory format of x."""
    memory = memory_format(x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=memory)
