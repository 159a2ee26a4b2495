"""Convolution of an image whose channels lie in several tensors, without concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from hetconv.errors import KernelError
from hetconv.sharding.conv_spec import ConvGeometry, ConvSpec, Padding

from .backend_choice import Backend, Route, check_backend, unsupported_reason
from .checks import (
    check_channels_contiguous,
    check_no_gradients,
    check_tensor,
    spec_of,
)
from .chip import Chip, chip_of
from .concat import MAX_PARTS, check_parts, concat_channels
from .conv2d_op import padding_of, pair_of
from .dispatch import forward_2d, precision, preferred, query_of
from .epilogue import Epilogue, EpilogueSpec
from .launch import LaunchSequence, StridedLayout, empty, krsc, nhwc
from .tiles import Tile


def conv2d_parts(
    parts: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] | Padding = 0,
    dilation: int | Sequence[int] = 1,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    slope: float = 0.01,
    out: Tensor | None = None,
    tile: Tile | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Returns the convolution of cat(parts) with its epilogue, (N, K, P, Q), without autograd.

    Under ``backend="triton"``, given here or to `set_backend`, one kernel reads up to
    16 parts where they lie, as channels_last at any strides of samples, rows and
    columns; what lies otherwise is converted first. Its reduction starts anew for each
    part, in steps of ``tile.k`` channels. Parts of a multiple of 16 bytes of channels,
    at such addresses, are read 16 bytes at a time, and so are their filters. Else
    `concat_channels` joins the parts, and `conv2d_forward` convolves them: nobody has
    measured yet which is faster.

    Args:
        parts: Tensors (N, C_i, H, W), of which any may have no channels.
        weight: Filters (K, sum of C_i, R, S).
        bias: See `conv2d`, as are stride, padding and dilation.
        scale: See `conv2d_forward`, as are shift, residual, activation, slope and out.
        tile: Tile of pointers without split-k.
        backend: "aten", "triton" or "auto".

    Raises:
        KernelError: The arguments do not fit each other, one of them requires a
            gradient, or Triton is asked for here and cannot compute this.
    """
    parts = list(parts)
    check_parts(parts)
    like, C = parts[0], sum(p.shape[1] for p in parts)
    # The shape of all parts together, without memory.
    x = like.new_empty(()).expand(like.shape[0], C, *like.shape[2:])
    steps, reach = pair_of(stride, "stride"), pair_of(dilation, "dilation")
    sides = padding_of(padding, weight, steps, reach)
    geometry = ConvGeometry(steps, sides, reach, 1)
    spec = spec_of(x, weight, bias, geometry)
    epilogue = Epilogue.of(scale, shift, residual, activation, slope)
    epilogue.check(spec.y_shape, x)
    check_tensor("out", out, spec.y_shape, x.dtype, x.device)
    check_channels_contiguous(out)
    check_no_gradients(
        "conv2d_parts", *parts, weight, bias, *epilogue.tensors.values(), out
    )
    reason = _unsupported_reason(spec, x, len(parts), tile)
    if check_backend(backend) == "triton" and reason is not None:
        raise KernelError(
            f"a convolution of parts was asked of Triton, but {reason}; use backend='auto'"
        )
    is_empty = 0 in (*spec.w_shape, *spec.y_shape)
    if preferred(backend) == "triton" and reason is None and not is_empty:
        return launch_parts(spec, parts, weight, epilogue.with_bias(bias), out, tile)
    whole = concat_channels(parts, backend=backend)
    return forward_2d(
        whole, weight, bias, geometry, epilogue, out, Route(backend, tile)
    )


def launch_parts(
    spec: ConvSpec,
    parts: Sequence[Tensor],
    w: Tensor,
    epilogue: Epilogue,
    out: Tensor | None,
    tile: Tile | None,
) -> Tensor:
    """Returns `conv2d_parts` by one launch; neither result nor filters are empty.

    Args:
        spec: The convolution of all parts together.
        parts: Tensors (N, C_i, H, W).
        w: Filters (K, sum of C_i, R, S).
        epilogue: What is applied to the convolution, bias included.
        out: Tensor (N, K, P, Q) that receives the result.
        tile: Tile of pointers without split-k; None for the default one.
    """
    ready = [nhwc(p) for p in parts if p.shape[1]]
    w, epilogue = krsc(w), epilogue.for_triton()
    y = out if out is not None else empty(spec.y_shape, ready[0])
    layouts = tuple(map(StridedLayout.of, ready))
    both = StridedLayout.of(w), StridedLayout.of(y)
    launch = _launch(
        spec, layouts, *both, precision(spec), epilogue.spec, tile, chip_of(y.device)
    )
    named = {f"x{i}": p for i, p in enumerate(ready)}
    launch.run(**named, w=w, y=y, **epilogue.tensors)
    return y


@lru_cache(4096)
def _launch(
    spec: ConvSpec,
    parts: tuple[StridedLayout, ...],
    w: StridedLayout,
    y: StridedLayout,
    precision: str,
    epilogue: EpilogueSpec,
    tile: Tile | None,
    chip: Chip,
) -> LaunchSequence:
    from .triton import conv2d_parts as multi_input
    from .triton.backend import usable_tile

    gemm = multi_input.forward(spec, parts, w, y, precision, epilogue)
    tile = usable_tile(
        tile or multi_input.default_tile(gemm.shape, chip), gemm.shape, chip
    )
    return multi_input.launches(gemm, tile)


def _unsupported_reason(
    spec: ConvSpec, x: Tensor, parts: int, tile: Tile | None
) -> str | None:
    """Why the kernel cannot compute this, or None."""
    if parts > MAX_PARTS:
        return f"it takes up to {MAX_PARTS} parts, not {parts}"
    if tile is not None and (tile.kind != "pointer" or tile.split_k > 1):
        return f"it takes tiles of pointers without split-k, not {tile}"
    return unsupported_reason(query_of("forward", spec, x.device, tile))
