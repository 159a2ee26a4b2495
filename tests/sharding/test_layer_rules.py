"""Sharding rules of layers, as laws over any layout, and the splits that are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hetconv.errors import HetConvError, SplitError
from hetconv.sharding.conv_spec import ConvSpec, Window
from hetconv.sharding.layer_rules import Conv, Linear, window_reads
from hetconv.sharding.layout import Box, Layout, apportion, spans
from hetconv.sharding.param_shards import ParamShards
from hetconv.sharding.rule import OpSharding
from hetconv.sharding.split import KINDS, REPLICATE, SPATIAL_KINDS, Split, SplitKind
from tests.nets import split_of
from tests.strategies import layouts, sizes, weights, windows, worlds

SPEC = ConvSpec(3, 8, (9, 7), 12, (3, 3), (2, 1), ((1, 1), (1, 1)), (1, 1))
TONE = ConvSpec(2, 4, (9,), 6, (3,), (1,), ((1, 1),), (1,))


def covers_once(layout: Layout) -> bool:
    """Whether every element is on one rank, or on all peers unless it is sharded."""
    count, holders = np.zeros(layout.shape, dtype=int), np.ones(layout.shape, dtype=int)
    for rank, box in enumerate(layout.boxes):
        own = box.slices_in(Box.whole(layout.shape))
        count[own] += 1
        if layout.kind != "sharded":
            holders[own] = len(layout.peers(rank))
    return bool((count == holders).all())


def assert_fits(
    sharding: OpSharding, inputs: tuple[Layout, ...], shape: tuple[int, ...]
) -> None:
    assert sharding.output.shape == shape
    assert covers_once(sharding.output)
    for read, x in zip(sharding.input_layouts, inputs, strict=True):
        assert (read.shape, read.world) == (x.shape, x.world)
        assert all(
            box.intersect(Box.whole(x.shape)) == box for box in read.boxes if box.numel
        )


@st.composite
def convolutions(draw: st.DrawFn) -> Conv:
    """Draws a convolution of any rank whose output is not empty."""
    groups, rank = draw(st.sampled_from([1, 1, 2, 3])), draw(st.integers(1, 3))
    N, C, K = (
        draw(st.integers(1, 3)),
        groups * draw(st.integers(1, 4)),
        groups * draw(st.integers(1, 4)),
    )
    sides = [draw(windows.filter(lambda v: v.out_size(4) > 0)) for _ in range(rank)]
    size = tuple(draw(st.integers(4, 12)) for _ in sides)
    kernel, stride, dilation = zip(
        *((v.kernel, v.stride, v.dilation) for v in sides), strict=True
    )
    return Conv(
        ConvSpec(
            N,
            C,
            size,
            K,
            kernel,
            stride,
            tuple((v.pad_lo, v.pad_hi) for v in sides),
            dilation,
            groups,
        )
    )


@given(st.data(), convolutions(), st.sampled_from(KINDS), worlds)
def test_a_convolution_under_any_split_yields_every_element_once(
    data: st.DataObject, op: Conv, kind: SplitKind, world: int
) -> None:
    assume(kind not in SPATIAL_KINDS or op.dim(kind) is not None)
    split = split_of(op, kind, data.draw(weights(world)))
    op.check(split, world)
    x = data.draw(layouts(op.spec.x_shape, world))
    assert_fits(op.sharding((x,), split), (x,), op.spec.y_shape)


@given(st.data(), convolutions(), st.sampled_from(list(SPATIAL_KINDS)), worlds)
def test_rows_in_proportion_read_the_rows_of_their_windows(
    data: st.DataObject, op: Conv, kind: SplitKind, world: int
) -> None:
    ratio, dim = (
        data.draw(weights(world)),
        2 + op.spec.spatial_dims - SPATIAL_KINDS[kind],
    )
    assume(dim >= 2)
    sharding = op.sharding(
        (Layout.replicated(op.spec.x_shape, world),), Split(kind, ratio)
    )
    assert tuple(box.shape[dim] for box in sharding.output.boxes) == apportion(
        op.spec.y_shape[dim], ratio
    )
    window = op.spec.windows[dim - 2]
    for read, out in zip(
        sharding.input_layouts[0].boxes, sharding.output.boxes, strict=True
    ):
        reads = window.reads((out.lo[dim], out.hi[dim]), op.spec.x_shape[dim])
        assert (read.lo[dim], read.hi[dim]) == reads


@pytest.mark.parametrize(
    ("kernel", "rows", "expected"),
    [
        (1, (4, 4), [(0, 4), (4, 8)]),  # the row after the last window comes along
        (1, (3, 5), [(0, 3), (4, 7)]),  # not where a rank's first row is cut off anyway
        (2, (4, 4), [(0, 4), (4, 8)]),  # every row is in a window
        (1, (8, 0), [(0, 3), (4, 7)]),  # another rank reads it
    ],
)
def test_rows_that_no_window_reads_are_not_cut_off(
    kernel: int, rows: tuple[int, int], expected: list[tuple[int, int]]
) -> None:
    window = Window(kernel, stride=2)
    x, y = (
        Layout.sharded((1, 3, 8, 2), 2, rows),
        Layout.sharded((1, 3, 4, 2), 2, (2, 2)),
    )
    reads = window_reads(x, y, 2, window)
    assert [(box.lo[2], box.hi[2]) for box in reads.boxes] == expected
    gathered = window_reads(Layout.replicated(x.shape, 2), y, 2, window)
    assert [box.hi[2] for box in gathered.boxes] == [
        window.reads((a, a + 2), 8)[1] for a in (0, 2)
    ]


@given(st.data(), convolutions(), worlds)
def test_own_filters_read_the_channels_of_their_groups(
    data: st.DataObject, op: Conv, world: int
) -> None:
    split = Split("filter", data.draw(sizes(op.spec.K, world)))
    (need,) = op.sharding(
        (Layout.replicated(op.spec.x_shape, world),), split
    ).input_layouts
    C, K, groups = op.spec.C, op.spec.K, op.spec.groups
    for (a, b), box in zip(spans(split.sizes), need.boxes, strict=True):
        channels = {
            c
            for k in range(a, b)
            for c in range(C)
            if c * groups // C == k * groups // K
        }
        assert channels == set(range(box.lo[1], box.hi[1]))


@given(st.data(), worlds)
def test_whole_groups_of_channels_are_split_by_their_filters(
    data: st.DataObject, world: int
) -> None:
    op = Conv(replace(SPEC, C=6, K=12, groups=3))
    groups = data.draw(sizes(3, world))
    split = Split("channel", tuple(2 * g for g in groups))
    assert op.canonical(split) == Split("filter", tuple(4 * g for g in groups))
    assert op.param_shards(split, world)["weight"] == ParamShards.sharded(
        op.spec.w_shape, 0, tuple(4 * g for g in groups)
    )
    assert (
        op.sharding((Layout.replicated(op.spec.x_shape, world),), split).output.kind
        == "sharded"
    )


@pytest.mark.parametrize(
    ("kind", "weight", "bias"),
    [
        (
            "filter",
            ParamShards.sharded((12, 12), 0, (9, 0, 3)),
            ParamShards.sharded((12,), 0, (9, 0, 3)),
        ),
        (
            "channel",
            ParamShards.sharded((12, 12), 1, (9, 0, 3)),
            ParamShards.on_ranks((12,), (1, 1, 1)),
        ),
        (
            "replicate",
            ParamShards.on_ranks((12, 12), (1, 1, 1)),
            ParamShards.on_ranks((12,), (1, 1, 1)),
        ),
        *(
            (
                kind,
                ParamShards.on_ranks((12, 12), (9, 0, 3)),
                ParamShards.on_ranks((12,), (9, 0, 3)),
            )
            for kind in ("sample", *SPATIAL_KINDS)
        ),
    ],
)
def test_ranks_hold_slices_or_the_whole_parameter_where_they_work(
    kind: SplitKind, weight: ParamShards, bias: ParamShards
) -> None:
    split = Split(kind, () if kind == "replicate" else (9, 0, 3))
    assert Linear((4, 12), 12).param_shards(split, 3) == {
        "weight": weight,
        "bias": bias,
    }
    held = Conv(replace(SPEC, C=12)).param_shards(split, 3)
    of_conv = [Box((*box.lo, 0, 0), (*box.hi, *SPEC.kernel)) for box in weight.boxes]
    assert held == {
        "weight": ParamShards((12, 12, *SPEC.kernel), tuple(of_conv)),
        "bias": bias,
    }


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("diagonal", (1, 1)),
        ("filter", ()),
        ("filter", (0, 0)),
        ("filter", (3, -1)),
        ("height", (1.5, 2)),
        ("height", (True, 2)),
        ("replicate", (1, 1)),
    ],
)
def test_an_invalid_split_is_refused(kind: SplitKind, sizes: tuple[int, ...]) -> None:
    with pytest.raises(SplitError, match=kind):
        Split(kind, sizes)


def test_sizes_may_be_given_as_a_list() -> None:
    assert Split("filter", [1, 2]) == Split("filter", (1, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "split", "match"),
    [
        (Conv(SPEC), Split("filter", (6, 6, 0)), "3 sizes for 2 ranks"),
        (Conv(SPEC), Split("filter", (6, 5)), "11.* 12 filters"),
        (Conv(SPEC), Split("channel", (6, 6)), "12.* 8 input channels"),
        (Conv(replace(SPEC, groups=2)), Split("channel", (3, 5)), "through the groups"),
        (
            Conv(SPEC),
            Split("depth", (1, 1)),
            "a 2-D convolution has no depth to split; use sample, height, width,",
        ),
        (
            Conv(TONE),
            Split("height", (1, 1)),
            "a 1-D convolution has no height to split; use sample, width, filter or",
        ),
        (
            Linear((4, 6), 8),
            Split("height", (1, 1)),
            "no height to split; use sample, filter or channel",
        ),
        (
            Linear((4, 3, 3, 6), 8),
            Split("depth", (1, 1)),
            "no depth to split; use sample, height, width, filter or",
        ),
        (
            Linear((6,), 8),
            Split("sample", (1, 1)),
            "no sample to split; use filter or channel",
        ),
        (Linear((4, 6), 8), Split("filter", (8,)), "1 sizes for 2 ranks"),
        (Linear((4, 6), 8), Split("filter", (4, 5)), "8 output features"),
        (Linear((4, 6), 8), Split("channel", (4, 4)), "6 input features"),
    ],
)
def test_a_split_that_does_not_fit_its_operator_is_refused(
    op: Conv | Linear, split: Split, match: str
) -> None:
    with pytest.raises(SplitError, match=match) as error:
        op.check(split, 2)
    assert isinstance(error.value, HetConvError)


@pytest.mark.parametrize("op", [Conv(SPEC), Linear((4, 6), 8)])
def test_replicate_fits_any_number_of_ranks(op: Conv | Linear) -> None:
    op.check(REPLICATE, 7)
    x = Layout.replicated(SPEC.x_shape if isinstance(op, Conv) else op.x_shape, 7)
    assert op.sharding((x,), REPLICATE).output.kind == "replicated"


@pytest.mark.parametrize(
    ("kind", "ratio", "output"),
    [
        ("filter", (6, 2), Layout.sharded((5, 4, 8), 2, (6, 2))),
        ("channel", (6, 0), Layout.partial((5, 4, 8), 2, (6, 0))),
        ("sample", (3, 1), Layout.sharded((5, 4, 8), 0, (4, 1))),
    ],
)
def test_a_linear_layer_on_more_dimensions(
    kind: SplitKind, ratio: tuple[int, ...], output: Layout
) -> None:
    sharding = Linear((5, 4, 6), 8).sharding(
        (Layout.replicated((5, 4, 6), 2),), Split(kind, ratio)
    )
    assert sharding.output == output


def test_filter_then_channel_needs_no_exchange_between() -> None:
    """The output layout of the first is the input layout of the second."""
    first = Conv(SPEC)
    second = Conv(ConvSpec(3, 12, (5, 7), 4, (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1)))
    output = first.sharding(
        (Layout.replicated(SPEC.x_shape, 2),), Split("filter", (9, 3))
    ).output
    assert second.sharding((output,), Split("channel", (9, 3))).input_layouts == (
        output,
    )
