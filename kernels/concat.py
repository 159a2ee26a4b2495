"""Concatenation of channels that several devices computed, with an epilogue, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hetconv.errors import KernelError

from .backend_choice import DTYPES, Backend, check_backend, unavailable_reason
from .checks import (
    check_channels_contiguous,
    check_no_gradients,
    check_tensor,
    describe,
)
from .dispatch import prefers_triton
from .epilogue import Epilogue, EpilogueSpec
from .launch import LaunchSequence, StridedLayout, empty, nhwc, with_even_pixels

MAX_PARTS = 16  # of one launch


def concat_channels(
    parts: Tensor | Sequence[Tensor],
    sizes: Sequence[int] | None = None,
    *,
    image: tuple[int, int, int] | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    slope: float = 0.01,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Returns activation(scale * cat(parts) + shift + residual), (N, K, P, Q), channels_last.

    It is computed in float32 and differentiable in parts and residual. On CUDA a Triton
    kernel reads parts whose pixels lie at one stride where they are, and writes once;
    elsewhere, and for more than 16 parts, ATen computes the same.

    Args:
        parts: Tensors (N, k_i, P, Q), of which any may have no channels; or one flat
            buffer that holds them one after the other as (N, P, Q, k_i).
        sizes: The k_i of a flat buffer.
        image: (N, P, Q) of a flat buffer.
        scale: Factor per channel (K) in float32.
        shift: Summand per channel (K) in float32.
        residual: Summand (N, K, P, Q) in the data type of the parts.
        activation: One of relu, relu6, leaky_relu, silu, gelu and gelu_tanh, or None.
        slope: Slope of leaky_relu below zero.
        out: Tensor that receives the result, without autograd.
        backend: "triton" raises where Triton cannot compute this.

    Raises:
        KernelError: The arguments do not fit each other, or Triton is asked for here and
            cannot compute this.
    """
    found = as_parts(parts, sizes, image)
    check_parts(found)
    like = found[0]
    shape = (like.shape[0], sum(p.shape[1] for p in found), *like.shape[2:])
    epilogue = Epilogue.of(scale, shift, residual, activation, slope)
    epilogue.check(shape, like, torch.float32)
    check_tensor("out", out, shape, like.dtype, like.device)
    check_channels_contiguous(out)
    check_no_gradients("concat_channels in scale and shift", scale, shift)
    if out is not None:
        check_no_gradients("out=", *found, residual, out)
    reason = unavailable_reason(like.device) or unsupported_parts_reason(found)
    if check_backend(backend) == "triton" and reason is not None:
        raise KernelError(
            f"a concatenation of channels was asked of Triton, but {reason}; use "
            "backend='auto'"
        )
    if reason is not None or not prefers_triton(like, backend):
        y = epilogue.apply(torch.cat(found, 1))
        if out is not None:
            return out.copy_(y)
        return y.contiguous(memory_format=torch.channels_last)
    ready = [with_even_pixels(p) for p in found]
    epilogue = epilogue.for_triton()
    if out is not None:
        return launch_concat(ready, epilogue, out)
    result: Tensor = _Concat.apply(epilogue, epilogue.residual, *ready)
    return result


def epilogue_in_place(y: Tensor, epilogue: Epilogue) -> Tensor:
    """Applies an epilogue to y in its own memory, without autograd, and returns y.

    On CUDA it is one pass over y.

    Args:
        y: Tensor (N, K, ...) that is overwritten.
        epilogue: The epilogue.
    """
    if epilogue.is_identity:
        return y
    is_image = y.dim() == 4 and y.numel() and y.stride(1) == 1
    if is_image and StridedLayout.of(y).pixel_stride is not None and moves_by_triton(y):
        return launch_concat([y], epilogue.for_triton(), y)
    z = epilogue.apply(y)
    return y if z is y else y.copy_(z)


class _Concat(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, epilogue: Epilogue, residual: Tensor | None, *parts: Tensor
    ) -> Tensor:
        read_again = parts if epilogue.activation else ()
        ctx.save_for_backward(epilogue.scale, epilogue.shift, residual, *read_again)
        ctx.activation, ctx.sizes = epilogue[3:], [p.shape[1] for p in parts]
        return launch_concat(parts, epilogue)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        scale, shift, residual, *parts = ctx.saved_tensors
        epilogue = Epilogue(scale, shift, residual, *ctx.activation)
        dr, gradients = launch_split(nhwc(g), ctx.sizes, epilogue, parts)
        return None, dr, *gradients


def launch_concat(
    parts: Sequence[Tensor], epilogue: Epilogue, out: Tensor | None = None
) -> Tensor:
    """Returns `concat_channels` by Triton.

    Args:
        parts: Tensors (N, k_i, P, Q) as `with_even_pixels` returns them.
        epilogue: As `Epilogue.for_triton` returns it.
        out: Tensor (N, K, P, Q) that receives the result.
    """
    N, _, P, Q = parts[0].shape
    K = sum(p.shape[1] for p in parts)
    y = empty((N, K, P, Q), parts[0]) if out is None else out
    if len(parts) == 1 and epilogue.is_identity and is_one_run(parts[0], y):
        return y.copy_(parts[0])
    if y.numel():
        layouts = tuple(map(StridedLayout.of, parts))
        launch = _concat(layouts, StridedLayout.of(y), epilogue.spec)
        launch.run(y=y, **epilogue.tensors, **_numbered("part", parts))
    return y


def launch_split(
    g: Tensor, sizes: Sequence[int], epilogue: Epilogue, parts: Sequence[Tensor]
) -> tuple[Tensor | None, list[Tensor]]:
    """Returns the gradients of the residual, if there is one, and of the parts.

    Args:
        g: Gradient of `launch_concat`'s result (N, K, P, Q).
        sizes: Channels of each part.
        epilogue: As `launch_concat` was given it.
        parts: As `launch_concat` was given them; they are read under an activation.
    """
    N, K, P, Q = g.shape
    gradients = [empty((N, k, P, Q), g) for k in sizes]
    written = _numbered("gradient", gradients)
    if epilogue.residual is not None:
        written["dr"] = empty((N, K, P, Q), g)
    if g.numel():
        read = parts if epilogue.activation else gradients
        layouts = tuple(map(StridedLayout.of, read))
        launch = _split(layouts, StridedLayout.of(g), epilogue.spec)
        launch.run(g=g, **written, **epilogue.tensors, **_numbered("part", read))
    return written.get("dr"), gradients


def _numbered(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{name}{i}": t for i, t in enumerate(tensors)}


@lru_cache(4096)
def _concat(
    parts: tuple[StridedLayout, ...], y: StridedLayout, epilogue: EpilogueSpec
) -> LaunchSequence:
    from .triton.concat import concat_launch

    return LaunchSequence((concat_launch(parts, y, epilogue),))


@lru_cache(4096)
def _split(
    parts: tuple[StridedLayout, ...], g: StridedLayout, epilogue: EpilogueSpec
) -> LaunchSequence:
    from .triton.concat import split_launch

    return LaunchSequence((split_launch(parts, g, epilogue),))


def as_parts(
    parts: Tensor | Sequence[Tensor],
    sizes: Sequence[int] | None,
    image: tuple[int, int, int] | None,
) -> list[Tensor]:
    """Returns the parts of `concat_channels`, of a flat buffer as views of it.

    Args:
        parts: See `concat_channels`, as are sizes and image.

    Raises:
        KernelError: The arguments do not fit each other.
    """
    if not isinstance(parts, Tensor):
        if sizes is not None or image is not None:
            raise KernelError(
                "sizes and image are of a flat buffer; a list of parts has its own"
            )
        return list(parts)
    if sizes is None or image is None:
        raise KernelError(
            "a flat buffer needs the sizes of its parts, and the image = (N, P, Q) that all "
            "of them cover"
        )
    N, P, Q = image
    numbers = [N * P * Q * k for k in sizes]
    is_flat = parts.dim() == 1 and parts.is_contiguous()
    if not is_flat or min(sizes, default=-1) < 0 or parts.numel() != sum(numbers):
        raise KernelError(
            f"the flat buffer is {describe(parts)}, but sizes {tuple(sizes)} of an image "
            f"{image} take a contiguous one of {sum(numbers)} numbers"
        )
    split = zip(parts.split(numbers), sizes, strict=True)
    return [t.view(N, P, Q, k).permute(0, 3, 1, 2) for t, k in split]


def check_parts(parts: Sequence[Tensor]) -> None:
    """Raises `KernelError` for parts that are no images or differ in more than channels."""
    if not parts or any(p.dim() != 4 for p in parts):
        raise KernelError(
            "parts must be tensors (N, k, P, Q), one at least, not "
            f"{[tuple(p.shape) for p in parts]}"
        )
    like = parts[0]
    for i, p in enumerate(parts):
        fits = (p.shape[0], *p.shape[2:]) == (like.shape[0], *like.shape[2:])
        if not fits or p.dtype != like.dtype or p.device != like.device:
            raise KernelError(
                f"part {i} is {describe(p)}, but part 0 is {describe(like)}; they may differ "
                "in channels alone"
            )


def unsupported_parts_reason(parts: Sequence[Tensor]) -> str | None:
    """Returns why no kernel that only moves numbers takes these tensors, or None."""
    dtype = parts[0].dtype
    if str(dtype)[6:] not in DTYPES:
        return f"it computes in float16, bfloat16 and float32, not {dtype}"
    if len(parts) > MAX_PARTS:
        return f"it takes up to {MAX_PARTS} parts, not {len(parts)}"
    return None


def is_one_run(source: Tensor, target: Tensor) -> bool:
    """Returns whether torch copies one image to another as one run of memory.

    That is the copy whose bandwidth the kernels are measured against.

    Args:
        source: Tensor (N, C, H, W).
        target: Tensor of the same shape.
    """
    return all(
        t.is_contiguous(memory_format=torch.channels_last) for t in (source, target)
    )


def moves_by_triton(like: Tensor) -> bool:
    """Returns whether Triton moves the numbers of such a tensor."""
    reason = unavailable_reason(like.device) or unsupported_parts_reason([like])
    return reason is None and prefers_triton(like)
