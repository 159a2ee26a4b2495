"""`concat_channels`: what several devices computed of an image becomes one image,
finished in the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hetconv.errors import KernelError

from .backend_choice import Backend, known
from .dispatch import obstacle, said, wants_triton
from .epilogue import Finish, finished
from .launch import Memory, Program, empty, in_rows, nhwc

MOST_PARTS = 16


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
    """y = activation(scale * cat(parts) + shift + residual), (N, K, P, Q) in
    channels_last, in one pass.

    ``parts``: tensors (N, k_i, P, Q), of which any may have no channels; or one flat
    buffer that holds them one after the other as (N, P, Q, k_i), with their ``sizes``
    k_i and ``image`` = (N, P, Q). ``scale`` and ``shift`` (K) in float32 come as a
    pair; ``activation`` is one of relu, relu6, leaky_relu (with ``slope``), silu, gelu
    and gelu_tanh. It is computed in float32. Differentiable in parts and residual.
    ``out`` receives the result, without autograd.

    On CUDA a Triton kernel reads parts whose pixels lie at one stride where they are,
    and writes once; elsewhere, and for more than 16 parts, ATen computes the same,
    unless ``backend="triton"`` is given here. Raises `KernelError` for arguments that
    do not fit each other.
    """
    found = parts_of(parts, sizes, image)
    like = found[0]
    shape = (like.shape[0], sum(p.shape[1] for p in found), *like.shape[2:])
    check_parts(found, shape, scale, shift, residual, activation, out)
    finish = Finish.of(scale, shift, activation, slope)
    if not wants_triton(like, known(backend)):
        return _by_aten(found, scale, shift, residual, finish, out)
    if (why := obstacle(like.device) or refusal(found)) is not None:
        if backend == "triton":
            raise KernelError(
                f"a concatenation of channels was asked of Triton, but {why}; use backend='auto'"
            )
        return _by_aten(found, scale, shift, residual, finish, out)
    ready = [in_rows(p) for p in found]
    scale, shift = (t.contiguous() if t is not None else None for t in (scale, shift))
    residual = nhwc(residual) if residual is not None else None
    if out is not None:
        return joined(ready, scale, shift, residual, finish, out)
    y: Tensor = _Concat.apply(scale, shift, residual, finish, *ready)
    return y


def _by_aten(
    parts: list[Tensor],
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    finish: Finish,
    out: Tensor | None,
) -> Tensor:
    y = finished(
        torch.cat(parts, 1), scale, shift, residual, finish.activation, finish.slope
    )
    return (
        y.contiguous(memory_format=torch.channels_last) if out is None else out.copy_(y)
    )


def finish_in_place(
    y: Tensor, residual: Tensor | None, activation: str | None, slope: float = 0.01
) -> Tensor:
    """activation(y + residual), each as wanted, in y's own memory and in one pass over
    it on CUDA; without autograd.
    """
    if residual is None and activation is None:
        return y
    finish = Finish.of(None, None, activation, slope)
    able = (
        obstacle(y.device) is None and refusal([y]) is None and wants_triton(y, "auto")
    )
    if (
        able
        and y.dim() == 4
        and y.numel()
        and y.stride(1) == 1
        and Memory.of(y).step is not None
    ):
        return joined(
            [y], None, None, nhwc(residual) if residual is not None else None, finish, y
        )
    z = finished(y, None, None, residual, finish.activation, finish.slope)
    return y if z is y else y.copy_(z)


class _Concat(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scale: Tensor | None,
        shift: Tensor | None,
        residual: Tensor | None,
        finish: Finish,
        *parts: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(
            scale, shift, residual, *(parts if finish.activation else ())
        )
        ctx.finish, ctx.sizes = finish, [p.shape[1] for p in parts]
        return joined(parts, scale, shift, residual, finish)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        scale, shift, residual, *parts = ctx.saved_tensors
        dr, gradients = parted(
            nhwc(g), ctx.sizes, scale, shift, residual, ctx.finish, parts
        )
        return None, None, dr, None, *gradients


def joined(
    parts: Sequence[Tensor],
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    finish: Finish,
    out: Tensor | None = None,
) -> Tensor:
    """By Triton, of parts with their pixels at one stride; scale and shift are contiguous."""
    N, _, P, Q = parts[0].shape
    y = (
        out
        if out is not None
        else empty((N, sum(p.shape[1] for p in parts), P, Q), parts[0])
    )
    if y.numel():
        lies = (
            tuple(map(Memory.of, parts)),
            Memory.of(y),
            Memory.of(residual) if residual is not None else None,
        )
        _concat(*lies, finish).run(y=y, **_given(scale, shift, residual, parts))
    return y


def parted(
    g: Tensor,
    sizes: Sequence[int],
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    finish: Finish,
    parts: Sequence[Tensor],
) -> tuple[Tensor | None, list[Tensor]]:
    """The adjoint: gradients of the residual, if any, and of the parts, which an
    activation alone reads.
    """
    N, K, P, Q = g.shape
    gradients = [empty((N, k, P, Q), g) for k in sizes]
    dr = empty((N, K, P, Q), g) if residual is not None else None
    if g.numel():
        read = parts if finish.activation else gradients
        given = _given(scale, shift, residual, read) | {
            f"gradient{i}": t for i, t in enumerate(gradients)
        }
        lies = (
            tuple(map(Memory.of, read)),
            Memory.of(g),
            Memory.of(residual) if residual is not None else None,
        )
        _split(*lies, finish).run(
            g=g, **given, **({"dr": dr} if dr is not None else {})
        )
    return dr, gradients


def _given(
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    parts: Sequence[Tensor],
) -> dict[str, Tensor]:
    named = {f"part{i}": t for i, t in enumerate(parts)}
    return named | {
        n: t
        for n, t in (("scale", scale), ("shift", shift), ("residual", residual))
        if t is not None
    }


@lru_cache(4096)
def _concat(
    parts: tuple[Memory, ...], y: Memory, residual: Memory | None, finish: Finish
) -> Program:
    from .triton.concat import concat_recipe

    return Program((concat_recipe(parts, y, residual, finish),))


@lru_cache(4096)
def _split(
    parts: tuple[Memory, ...], g: Memory, residual: Memory | None, finish: Finish
) -> Program:
    from .triton.concat import split_recipe

    return Program((split_recipe(parts, g, residual, finish),))


def parts_of(
    parts: Tensor | Sequence[Tensor],
    sizes: Sequence[int] | None,
    image: tuple[int, int, int] | None,
) -> list[Tensor]:
    if not isinstance(parts, Tensor):
        if sizes is not None or image is not None:
            raise KernelError(
                "sizes and image are of a flat buffer; a list of parts has its own"
            )
        if not parts or any(p.dim() != 4 for p in parts):
            raise KernelError(
                "parts must be tensors (N, k, P, Q), one at least, not "
                f"{[tuple(p.shape) for p in parts]}"
            )
        return list(parts)
    if sizes is None or image is None:
        raise KernelError(
            "a flat buffer needs the sizes of its parts, and the image = (N, P, Q) that all "
            "of them cover"
        )
    N, P, Q = image
    numbers = [N * P * Q * k for k in sizes]
    if (
        parts.dim() != 1
        or not parts.is_contiguous()
        or min(sizes, default=-1) < 0
        or parts.numel() != sum(numbers)
    ):
        raise KernelError(
            f"the flat buffer is {said(parts)}, but sizes {tuple(sizes)} of an image {image} "
            "take a contiguous one of "
            f"{sum(numbers)} numbers"
        )
    split = zip(parts.split(numbers), sizes, strict=True)
    return [t.view(N, P, Q, k).permute(0, 3, 1, 2) for t, k in split]


def check_parts(
    parts: list[Tensor],
    shape: tuple[int, ...],
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    out: Tensor | None,
) -> None:
    like = parts[0]
    for i, p in enumerate(parts):
        fits = (p.shape[0], *p.shape[2:]) == (like.shape[0], *like.shape[2:])
        if not fits or p.dtype != like.dtype or p.device != like.device:
            raise KernelError(
                f"part {i} is {said(p)}, but part 0 is {said(like)}; they may differ in "
                "channels alone"
            )
    for name, t in (("residual", residual), ("out", out)):
        if t is not None and (
            tuple(t.shape) != shape or t.dtype != like.dtype or t.device != like.device
        ):
            raise KernelError(
                f"{name} is {said(t)}, but the result is {shape} in {like.dtype} on {like.device}"
            )
    if (scale is None) != (shift is None):
        raise KernelError(
            "scale and shift come as a pair; give ones or zeros for the other"
        )
    for name, t in (("scale", scale), ("shift", shift)):
        if t is not None and (
            tuple(t.shape) != (shape[1],)
            or t.dtype != torch.float32
            or t.device != like.device
        ):
            raise KernelError(
                f"{name} is {said(t)}, but must be ({shape[1]},) in torch.float32 on {like.device}"
            )
        if t is not None and t.requires_grad and torch.is_grad_enabled():
            raise KernelError(
                f"{name} requires a gradient, which is not computed; fold it under torch.no_grad()"
            )
    if out is not None:
        needing = [
            t for t in (*parts, residual, out) if t is not None and t.requires_grad
        ]
        if torch.is_grad_enabled() and needing:
            raise KernelError(
                "out= is not differentiable, but an argument requires a gradient; use "
                "torch.no_grad()"
            )
        if out.numel() and out.stride(1) != 1 and out.shape[1] > 1:
            raise KernelError(
                f"out has strides {out.stride()}, but its channels must lie beside each other"
            )


def refusal(parts: Sequence[Tensor]) -> str | None:
    """Why no kernel that only moves numbers takes these, or None."""
    if parts[0].dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it computes in float16, bfloat16 and float32, not {parts[0].dtype}"
    if len(parts) > MOST_PARTS:
        return f"it takes up to {MOST_PARTS} parts, not {len(parts)}"
    return None
