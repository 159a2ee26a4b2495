"""Windows, segments and convolution specs against torch's own convolutions."""

from __future__ import annotations

import warnings
from itertools import pairwise
from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from hetconv.errors import HetConvError
from hetconv.sharding.conv_spec import (
    ConvSpec,
    Segment,
    Window,
    pads_per_side,
)
from tests.strategies import windows


def numbers(*shape: int) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def conv(x: Tensor, w: Tensor, window: Window, pad: tuple[int, int]) -> Tensor:
    return F.conv1d(F.pad(x, pad), w, stride=window.stride, dilation=window.dilation)


def part(x: Tensor, w: Tensor, window: Window, segment: Segment) -> Tensor:
    """What the rows of a segment add to its output rows."""
    return conv(
        x[..., slice(*segment.rows)], w[..., slice(*segment.taps)], window, segment.pad
    )


@st.composite
def cut(draw: st.DrawFn, total: int) -> list[tuple[int, int]]:
    """``[0, total)`` in a few spans, empty ones among them."""
    return list(
        pairwise([0, *sorted(draw(st.lists(st.integers(0, total), max_size=4))), total])
    )


@given(windows, st.integers(1, 40))
def test_out_size_is_that_of_torch(window: Window, size: int) -> None:
    reach = window.dilation * (window.kernel - 1) + 1
    assume(size + window.pad_lo + window.pad_hi >= reach)
    y = conv(
        numbers(1, 1, size),
        numbers(1, 1, window.kernel),
        window,
        (window.pad_lo, window.pad_hi),
    )
    assert window.out_size(size) == y.shape[-1]


@given(windows, st.integers(1, 40))
def test_an_input_smaller_than_the_window_has_no_output(
    window: Window, size: int
) -> None:
    size = min(
        size, window.dilation * (window.kernel - 1) - window.pad_lo - window.pad_hi
    )
    assume(size > 0)
    assert window.out_size(size) == 0


@given(st.data(), windows, st.integers(1, 30))
def test_a_span_of_outputs_comes_from_what_it_reads(
    data: st.DataObject, window: Window, size: int
) -> None:
    count = window.out_size(size)
    assume(count)
    lo = data.draw(st.integers(0, count - 1))
    hi = data.draw(st.integers(lo + 1, count))
    x, w = numbers(2, 1, size), numbers(1, 1, window.kernel)
    whole = conv(x, w, window, (window.pad_lo, window.pad_hi))
    own = conv(
        x[..., slice(*window.reads((lo, hi), size))],
        w,
        window,
        window.padding((lo, hi), size),
    )
    torch.testing.assert_close(own, whole[..., lo:hi], rtol=0, atol=1e-12)


@given(windows, st.integers(1, 30), st.integers(0, 30))
def test_an_empty_span_reads_nothing(window: Window, size: int, p: int) -> None:
    assert window.reads((p, p), size) == (0, 0)
    assert window.padding((p, p), size) == (0, 0)


@given(st.data(), windows, st.integers(1, 40))
def test_segments_of_any_cut_sum_to_the_convolution(
    data: st.DataObject, window: Window, size: int
) -> None:
    count = window.out_size(size)
    assume(count)
    x, w = numbers(1, 2, size), numbers(1, 2, window.kernel)
    whole = conv(x, w, window, (window.pad_lo, window.pad_hi))
    total = torch.zeros_like(whole)
    for out in data.draw(cut(count)):
        for rows in data.draw(cut(size)):
            segment = window.segment(rows, out)
            if segment is not None:
                total[..., slice(*segment.out)] += part(x, w, window, segment)
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-12)


@given(st.data(), windows, st.integers(1, 40))
def test_a_segment_lies_within_what_was_asked(
    data: st.DataObject, window: Window, size: int
) -> None:
    count = window.out_size(size)
    assume(count)
    for out in data.draw(cut(count)):
        for rows in data.draw(cut(size)):
            segment = window.segment(rows, out)
            if segment is not None:
                assert rows[0] <= segment.rows[0] < segment.rows[1] <= rows[1]
                assert out[0] <= segment.out[0] < segment.out[1] <= out[1]
                assert 0 <= segment.taps[0] < segment.taps[1] <= window.kernel
                assert min(segment.pad) >= 0


@given(windows, st.integers(1, 40))
def test_an_uncut_input_is_convolved_as_it_lies(window: Window, size: int) -> None:
    """A rank that holds everything neither copies nor cuts what the plain convolution would not."""
    kernel, stride, dilation, pad = (
        window.kernel,
        window.stride,
        window.dilation,
        window.pad_lo,
    )
    window = Window(kernel, stride, dilation, pad, pad)
    reach = dilation * (kernel - 1) + 1
    assume(pad < reach and size >= 2 * reach + stride)
    count = window.out_size(size)
    assert window.segment((0, size), (0, count)) == Segment(
        (0, size), (0, count), (0, kernel), (pad, pad)
    )


@pytest.mark.parametrize(
    ("rows", "out", "segment"),
    [
        ((0, 4), (0, 4), Segment((0, 4), (0, 4), (0, 3), (1, 1))),
        ((4, 5), (0, 4), Segment((4, 5), (3, 4), (2, 3), (0, 0))),
        ((3, 4), (4, 8), Segment((3, 4), (4, 5), (0, 1), (0, 0))),
        ((6, 8), (0, 4), None),
    ],
)
def test_segments_of_a_3x3_kernel(
    rows: tuple[int, int], out: tuple[int, int], segment: Segment | None
) -> None:
    assert Window(3, pad_lo=1, pad_hi=1).segment(rows, out) == segment


CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def padded(x: Tensor, sides: tuple[tuple[int, int], ...]) -> Tensor:
    return F.pad(x, [n for side in reversed(sides) for n in side])


@pytest.mark.parametrize("dilation", [(1, 1, 1), (2, 3, 1), (3, 1, 2)])
@pytest.mark.parametrize(
    "kernel", [(3, 3), (2, 4), (1, 2), (5, 1), (4,), (3,), (2, 3, 4)]
)
def test_same_padding_is_that_of_torch(
    kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> None:
    rank = len(kernel)
    x, w, dilation = (
        numbers(1, 1, *(9, 11, 10)[:rank]),
        numbers(1, 1, *kernel),
        dilation[:rank],
    )
    sides = pads_per_side("same", kernel, (1,) * rank, dilation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it copies for even kernels
        expected = CONVOLVE[rank](x, w, padding="same", dilation=dilation)
    assert torch.equal(CONVOLVE[rank](padded(x, sides), w, dilation=dilation), expected)


@pytest.mark.parametrize(
    ("padding", "sides"),
    [
        ("valid", ((0, 0), (0, 0))),
        (2, ((2, 2), (2, 2))),
        ((1,), ((1, 1), (1, 1))),
        ((1, 3), ((1, 1), (3, 3))),
        ([0, 2], ((0, 0), (2, 2))),
    ],
)
def test_padding_per_side(padding: str | int | tuple[int, ...], sides: object) -> None:
    assert pads_per_side(padding, (3, 3), (2, 2), (1, 1)) == sides


def test_padding_per_side_of_another_rank() -> None:
    assert pads_per_side(1, (3,), (2,), (1,)) == ((1, 1),)
    assert pads_per_side((0, 1, 2), (3, 3, 3), (2, 2, 2), (1, 1, 1)) == (
        (0, 0),
        (1, 1),
        (2, 2),
    )
    with pytest.raises(
        HetConvError,
        match=r"does not fit a 3-D convolution; give one or 3 non-negative integers",
    ):
        pads_per_side((1, 1), (3, 3, 3), (1, 1, 1), (1, 1, 1))


@pytest.mark.parametrize(
    ("padding", "stride", "match"),
    [
        ("full", (1, 1), "'full'"),
        ("same", (2, 1), "stride"),
        (-1, (1, 1), "-1"),
        ((1, 1, 1), (1, 1), "does not fit"),
    ],
)
def test_padding_that_torch_refuses_is_refused(
    padding: str | int, stride: tuple[int, int], match: str
) -> None:
    with pytest.raises(HetConvError, match=match):
        pads_per_side(padding, (3, 3), stride, (1, 1))


SPEC = ConvSpec(
    2, 6, (9, 11), 4, (3, 5), (2, 1), ((1, 0), (2, 2)), (1, 2), 2, "float16"
)
SPECS = [
    SPEC,
    ConvSpec(2, 6, (11,), 4, (5,), (2,), ((2, 1),), (2,), 2, "float16"),
    ConvSpec(
        2,
        6,
        (9, 11, 5),
        4,
        (3, 5, 2),
        (2, 1, 2),
        ((1, 0), (2, 2), (0, 1)),
        (1, 2, 1),
        2,
        "float16",
    ),
]
by_dimensions = pytest.mark.parametrize(
    "spec", SPECS, ids=lambda s: f"{len(s.size)} dimensions"
)


@by_dimensions
def test_a_spec_has_the_output_of_torch(spec: ConvSpec) -> None:
    x, w = padded(numbers(*spec.x_shape), spec.padding), numbers(*spec.w_shape)
    y = CONVOLVE[len(spec.size)](
        x, w, stride=spec.stride, dilation=spec.dilation, groups=spec.groups
    )
    assert spec.y_shape == tuple(y.shape)


@by_dimensions
def test_flops_count_each_product_and_each_sum(spec: ConvSpec) -> None:
    n, k, *image = spec.y_shape
    assert spec.flops == 2 * n * k * prod(image) * 3 * prod(spec.kernel)


@by_dimensions
def test_bytes_count_each_tensor_once(spec: ConvSpec) -> None:
    n, k, *image = spec.y_shape
    assert (n, k) == (2, 4)
    assert spec.bytes == 2 * (
        2 * 6 * prod(spec.size) + 4 * 3 * prod(spec.kernel) + 2 * 4 * prod(image)
    )


def test_letters_name_two_dimensions() -> None:
    assert SPEC.size == (SPEC.H, SPEC.W)
    assert SPEC.kernel == (SPEC.R, SPEC.S)
    assert SPEC.y_shape[2:] == (SPEC.P, SPEC.Q)


@pytest.mark.parametrize(
    ("C", "K", "groups"), [(6, 4, 3), (5, 4, 2), (4, 6, 4), (4, 4, 0)]
)
def test_groups_must_divide_channels_and_filters(C: int, K: int, groups: int) -> None:
    with pytest.raises(HetConvError, match="groups"):
        ConvSpec(1, C, (8,), K, (3,), (1,), ((0, 0),), (1,), groups)
