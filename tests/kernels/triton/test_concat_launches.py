"""Launches of the kernels that concatenate channels, and split them: of wide and narrow
parts, each number moves once.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hetconv import kernels
from hetconv.kernels.epilogue import NO_EPILOGUE
from hetconv.kernels.launch import Launch, StridedLayout
from hetconv.kernels.triton.concat import concat_launch, split_launch
from hetconv.kernels.triton.pack import BLOCK_UNITS
from tests.interpreter import DEVICE
from tests.strategies import Join

from .test_concat import assert_right, called, drawn

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")
SIZES = {
    "wide": (96, 160),
    "wide, odd": (131, 0, 77),
    "narrow": (8, 16, 24, 32, 32, 40, 48, 56),
    "narrow, odd": (3, 0, 8, 1),
}
LARGE = (2, 9, 13)  # takes several programs, of which the last is not full


def launch_of(
    sizes: Sequence[int],
    image: tuple[int, int, int],
) -> Launch:
    """Parts in float16, packed."""
    N, P, Q = image
    parts = [StridedLayout.packed((N, k, P, Q), "float16") for k in sizes]
    y = StridedLayout.packed((N, sum(sizes), P, Q), "float16")
    return concat_launch(parts, y, NO_EPILOGUE)


@pytest.mark.parametrize("name", SIZES)
def test_parts_without_channels_do_not_count(name: str) -> None:
    starts = [
        launch_of(sizes, LARGE).constants["STARTS"]
        for sizes in (SIZES[name], (0, *SIZES[name], 0, 0))
    ]
    assert starts[0] == starts[1]


@pytest.mark.parametrize("name", SIZES)
def test_no_program_is_empty(name: str) -> None:
    """They are as many as the units of the result fill."""
    launch = launch_of(SIZES[name], LARGE)
    N, P, Q = LARGE
    blocks = N * P * Q * launch.constants["STARTS"][-1] / BLOCK_UNITS
    assert blocks <= launch.grid[0] < blocks + 1
    assert launch.grid[1:] == (1, 1)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("name", SIZES)
def test_several_programs_are_right(
    name: str, activation: str | None, dtype: str
) -> None:
    assert launch_of(SIZES[name], LARGE).grid[0] > 5
    assert_right(drawn(Join(LARGE, SIZES[name], dtype, True, True, activation)))


@pytest.mark.parametrize("k", [8, 72, 5, 67])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16])
def test_up_to_16_parts_are_right(count: int, k: int) -> None:
    sizes = (k,) * count
    assert_right(drawn(Join((1, 3, 5), sizes, "float16", True, False, "relu")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("K", "cut"), [(256, 128), (256, 101), (32, 8), (32, 5)])
def test_every_pattern_of_bits_is_kept(K: int, cut: int, dtype: torch.dtype) -> None:
    """NaN with any payload, denormals, -0; both ways."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=DEVICE)
    whole = bits.view(dtype).view(1, 16, -1, K).permute(0, 3, 1, 2)
    parts = [
        t.contiguous(memory_format=torch.channels_last).requires_grad_()
        for t in whole.split([cut, K - cut], 1)
    ]
    y = kernels.concat_channels(parts, backend="triton")
    gradients = torch.autograd.grad(y, parts, whole)
    for mine, theirs in zip((y, *gradients), (whole, *parts), strict=True):
        found, expected = (t.detach().contiguous() for t in (mine, theirs))
        assert found.view(torch.int16).equal(expected.view(torch.int16))


def test_a_part_alone_is_copied_by_torch(launched: list[str]) -> None:
    """If it is one run of memory, and only there."""
    t = drawn(Join((2, 3, 4), (16,), "float16"))
    y, gradient = called(t)
    assert y.equal(t.parts[0])
    assert gradient.equal(t.g)
    assert launched == ["split"]
    launched.clear()
    wider = drawn(Join((2, 3, 4), (24,), "float16")).parts[0][:, 8:]
    assert kernels.concat_channels([wider], backend="triton").equal(wider)
    assert launched == ["concat"]


@pytest.mark.parametrize("name", SIZES)
def test_nothing_outside_images_of_several_strides_is_written(name: str) -> None:
    """Rows that are a slice of a taller image: its pixels have no single stride."""
    t = drawn(Join((2, 7, 9), SIZES[name], "bfloat16"))
    N, K, P, Q = t.g.shape
    taller = torch.full((N, P + 3, Q, K), torch.inf, dtype=t.g.dtype, device=DEVICE)
    slot = taller[:, 1:-2].permute(0, 3, 1, 2)
    kernels.concat_channels(t.parts, out=slot, backend="triton")
    assert slot.equal(torch.cat(t.parts, 1))
    assert taller.isfinite().sum() == slot.numel()


def test_pixels_at_one_stride_are_not_divided() -> None:
    """Into samples, rows and columns: each is an image of its own."""
    launch = launch_of((96, 160), LARGE)
    assert (launch.scalars["P"], launch.scalars["Q"]) == (1, 1)
    assert launch.scalars["y_strides"] == (32, 0, 0)
    tall = StridedLayout((2, 256, 3, 5), (256 * 5 * 7, 1, 256 * 5, 256), "float16")
    parts = [StridedLayout.packed((2, k, 3, 5), "float16") for k in (96, 160)]
    for launch in (
        concat_launch(parts, tall, NO_EPILOGUE),
        split_launch(parts, tall, NO_EPILOGUE),
    ):
        assert (launch.scalars["P"], launch.scalars["Q"]) == (3, 5)
