"""Inputs and outputs as slices of larger tensors, of any strides, empty ones, and ones
beyond 32-bit addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hetconv import kernels
from hetconv.errors import KernelError
from hetconv.kernels import Tile
from hetconv.kernels.tiles import Pass
from hetconv.sharding.conv_spec import ConvSpec
from tests.interpreter import (
    BOUNDS,
    CHIP,
    POINTER,
    SAME,
    TMA,
    assert_close,
    assert_right,
    by_triton,
    geometry,
    images,
    skip_unless_it_runs,
    tensors,
    truth,
)

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")
hopper = pytest.mark.skipif(CHIP.arch < 90, reason="needs Hopper's copy engine")
Margins = dict[
    int, tuple[int, int, int]
]  # dimension: numbers before it, step, numbers after it
PLACES: dict[str, Margins] = {
    "channels": {1: (8, 1, 16)},
    "channels off the grid": {1: (3, 1, 2)},
    "channels beside the grid": {
        1: (4, 1, 4)
    },  # strides of 16 bytes, but not the address
    "rows": {2: (2, 1, 3)},
    "columns": {3: (1, 1, 2)},
    "every second row": {2: (0, 2, 0)},
    "every second column": {3: (1, 2, 0)},
    "samples": {0: (1, 2, 1)},
    "channels, rows and columns": {1: (8, 1, 8), 2: (1, 1, 0), 3: (0, 1, 1)},
}


def placed(t: Tensor, margins: Margins) -> Tensor:
    """The same numbers as a slice of a larger tensor, which is NaN everywhere else."""
    at = [margins.get(i, (0, 1, 0)) for i in range(4)]
    sizes = [
        lo + size * step + hi for size, (lo, step, hi) in zip(t.shape, at, strict=True)
    ]
    whole = torch.full(sizes, torch.nan, dtype=t.dtype, device=t.device).contiguous(
        memory_format=torch.channels_last
    )
    part = whole[
        tuple(
            slice(lo, lo + n * step, step)
            for n, (lo, step, _) in zip(t.shape, at, strict=True)
        )
    ]
    return part.copy_(t)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: lambda t, m=m: placed(t, m) for name, m in PLACES.items()},  # type: ignore[misc]
    "NCHW": lambda t: t.contiguous(),
    "rows and columns changed over": lambda t: (
        t.mT.contiguous(
            memory_format=torch.channels_last
        ).mT  # a column's rows lie one after the other
    ),
    "one sample, expanded": lambda t: t[:1].expand(t.shape),
    "one number, expanded": lambda t: t[:1, :1, :1, :1].expand(t.shape),
}
UNFETCHED = (
    "channels off the grid",
    "channels beside the grid",
    "one sample, expanded",
)
LYING = images(16, 24, (6, 5), 3, 3, (1, 1), SAME)
ONE_TAP = images(16, 24, (6, 5), 1, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["x", "w", "g"])
@pytest.mark.parametrize(
    "spec",
    [LYING, ONE_TAP, replace(ONE_TAP, N=1)],
    ids=["3x3", "1x1", "1x1 of one image"],
)
def test_tensors_lie_anyhow(spec: ConvSpec, name: str, layout: str) -> None:
    t = tensors(spec)
    t = t._replace(**{name: LAYOUTS[layout](getattr(t, name))})
    passes: dict[str, tuple[Pass, ...]] = {
        "x": ("forward", "weight gradient"),
        "w": ("forward", "input gradient"),
        "g": ("input gradient", "weight gradient"),
    }
    assert_right(spec, t, POINTER, passes[name])


@hopper
@pytest.mark.parametrize("layout", [n for n in LAYOUTS if n not in UNFETCHED])
@pytest.mark.parametrize(
    ("name", "what"),
    [("x", "forward"), ("w", "input gradient"), ("g", "weight gradient")],
)
def test_boxes_come_from_tensors_that_lie_anyhow(
    name: str, what: Pass, layout: str
) -> None:
    t = tensors(LYING)
    assert_right(
        LYING, t._replace(**{name: LAYOUTS[layout](getattr(t, name))}), TMA, (what,)
    )


@pytest.mark.parametrize("layout", UNFETCHED)
def test_boxes_are_refused_what_the_copy_engine_cannot_fetch(layout: str) -> None:
    t = tensors(LYING)
    with pytest.raises(
        KernelError, match=r"tma:64x64x16:4w2s1z reads by TMA.* 16-byte aligned"
    ):
        by_triton("forward", LYING, t._replace(x=LAYOUTS[layout](t.x)), TMA)


def test_few_channels_of_a_wider_image_are_not_taken_for_its_numbers() -> None:
    spec = images(3, 20, (9, 11), 3, 7, (2, 2), ((1, 2), (3, 0)))
    t = tensors(spec)
    t = t._replace(x=placed(t.x, {1: (1, 1, 0)}))
    assert_right(spec, t, POINTER, ("forward", "weight gradient"))


@pytest.mark.parametrize("margins", PLACES.values(), ids=list(PLACES))
@pytest.mark.parametrize("tile", [POINTER, replace(POINTER, split_k=3), TMA], ids=str)
def test_a_result_fills_its_slot_and_nothing_else(tile: Tile, margins: Margins) -> None:
    skip_unless_it_runs(tile)
    t = tensors(LYING)
    slot = placed(t.g, margins).fill_(torch.nan)
    whole = slot._base
    assert whole is not None
    args = (t.x, t.w, t.bias, *geometry(LYING))
    assert kernels.conv2d_forward(*args, out=slot, tile=tile, backend="triton") is slot
    assert slot.equal(kernels.conv2d_forward(*args, tile=tile, backend="triton"))
    assert whole.isfinite().sum() == slot.numel()


@pytest.mark.parametrize("backend", ["triton", "aten"])
@pytest.mark.parametrize("empty", ["N", "C", "K"])
def test_empty_convolutions(
    empty: str, backend: kernels.backend_choice.Backend
) -> None:
    sizes = {"N": 2, "C": 16, "K": 24, empty: 0}
    spec = replace(
        images(sizes["C"], sizes["K"], (6, 5), 3, 3, dtype="float16"), N=sizes["N"]
    )
    t = tensors(spec)
    zeros = kernels.conv2d_forward(t.x, t.w, None, *geometry(spec), backend=backend)
    assert zeros.shape == spec.y_shape
    assert not zeros.any()
    y = kernels.conv2d_forward(t.x, t.w, t.bias, *geometry(spec), backend=backend)
    assert_close(y, truth("forward", spec, t), BOUNDS["float16"])
    dx, dw, db = kernels.conv2d_backward(
        t.g, t.x, t.w, *geometry(spec), backend=backend
    )
    assert dx is not None
    assert dw is not None
    assert db is not None
    assert_close(dx, truth("input gradient", spec, t), BOUNDS["float16"])
    assert_close(dw, truth("weight gradient", spec, t), BOUNDS["float16"])
    assert db.equal(t.g.sum((0, 2, 3)))


@pytest.mark.parametrize(("N", "stride"), [(2, 2**31 + 16), (3, 2**30)])
@pytest.mark.parametrize("name", ["x", "g"])
@pytest.mark.parametrize("tile", [POINTER, TMA], ids=str)
def test_inputs_beyond_32_bits(
    tile: Tile, name: str, N: int, stride: int, sparse: Callable[[Tensor, int], Tensor]
) -> None:
    skip_unless_it_runs(tile)
    spec = replace(images(16, 16, (3, 4), 2, 1), N=N)
    t = tensors(spec)
    t = t._replace(**{name: sparse(getattr(t, name), stride)})
    assert_right(
        spec,
        t,
        tile,
        ("forward" if name == "x" else "input gradient", "weight gradient"),
    )


@pytest.mark.parametrize(("N", "stride"), [(2, 2**31 + 16), (3, 2**30)])
@pytest.mark.parametrize("tile", [POINTER, replace(POINTER, split_k=3), TMA], ids=str)
def test_an_output_beyond_32_bits(
    tile: Tile, N: int, stride: int, sparse: Callable[[Tensor, int], Tensor]
) -> None:
    skip_unless_it_runs(tile)
    spec = replace(images(16, 16, (3, 4), 2, 1), N=N)
    t = tensors(spec)
    slot = sparse(t.g, stride).fill_(torch.nan)
    args = (t.x, t.w, t.bias, *geometry(spec))
    kernels.conv2d_forward(*args, out=slot, tile=tile, backend="triton")
    assert slot.equal(kernels.conv2d_forward(*args, tile=tile, backend="triton"))


@pytest.mark.parametrize("tile", [POINTER, TMA], ids=str)
def test_filters_strewn_beyond_32_bits(
    tile: Tile, sparse: Callable[[Tensor, int], Tensor]
) -> None:
    skip_unless_it_runs(tile)
    spec = images(16, 16, (3, 4), 2, 1)
    t = tensors(spec)
    assert_right(
        spec, t._replace(w=sparse(t.w, 2**28)), tile, ("forward", "input gradient")
    )
