"""The rules: what each operator reads and yields, as laws over any layout, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hetconv.errors import HetConvError, SplitError
from hetconv.following import (
    BatchNorm,
    Cat,
    GlobalAveragePool,
    Interpolate,
    Pad,
    Pieces,
    PixelShuffle,
    PixelUnshuffle,
    Pointwise,
    Pool,
    Reduction,
    Reshape,
    Softmax,
    Stack,
    View,
    on_parts,
)
from hetconv.layout import Box, Layout, Need, apportion, spans
from hetconv.rules import KINDS, REPLICATE, Conv, Gather, Linear, Op, Split, SplitKind, Step
from hetconv.spec import Conv2dSpec, Window

from .nets import split_of
from .strategies import layouts, sizes, weights, worlds

IMAGE = (3, 8, 6, 5)
SPEC = Conv2dSpec(3, 8, 9, 7, 12, 3, 3, (2, 1), ((1, 1), (1, 1)))


def covers_once(layout: Layout) -> bool:
    count = np.zeros(layout.shape, dtype=int)
    for box in layout.boxes:
        count[box.within(Box.whole(layout.shape))] += 1
    return bool((count == (1 if layout.kind == "sharded" else layout.world)).all())


def assert_fits(step: Step, inputs: tuple[Layout, ...], shape: tuple[int, ...]) -> None:
    assert step.output.shape == shape
    assert covers_once(step.output)
    for read, x in zip(step.reads, inputs, strict=True):
        assert (read.shape, read.world) == (x.shape, x.world)
        assert all(box.intersect(Box.whole(x.shape)) == box for box in read.boxes if box.numel)


@st.composite
def convolutions(draw: st.DrawFn) -> Conv:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    C, K = groups * draw(st.integers(1, 4)), groups * draw(st.integers(1, 4))
    R, S = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    pad, stride = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    N, H, W = draw(st.integers(1, 3)), draw(st.integers(4, 12)), draw(st.integers(4, 12))
    return Conv(Conv2dSpec(N, C, H, W, K, R, S, (stride, stride), ((pad, pad), (pad, pad)), (1, 1), groups))


OPERATORS: list[tuple[Op, tuple[tuple[int, ...], ...], tuple[int, ...]]] = [
    (Pointwise(IMAGE), (IMAGE,), IMAGE),
    (Pointwise(IMAGE), (IMAGE, IMAGE), IMAGE),
    (Pointwise(IMAGE), (IMAGE, (8, 1, 1)), IMAGE),
    (Pointwise(IMAGE), ((3, 8, 1, 1), IMAGE), IMAGE),
    (Pointwise(IMAGE), ((6, 1), (3, 1, 1, 5), (8, 1, 1)), IMAGE),
    (BatchNorm(IMAGE, True, True), (IMAGE,), IMAGE),
    (BatchNorm(IMAGE, False, False), (IMAGE,), IMAGE),
    (Pool("max", (3, 8, 3, 3), (Window(3, 2, 1, 1, 1),) * 2), (IMAGE,), (3, 8, 3, 3)),
    (Pool("average", (3, 8, 3, 3), (Window(2, 2), Window(2, 2, 1, 0, 1))), (IMAGE,), (3, 8, 3, 3)),
    (Pool("other", (3, 8, 4, 4)), (IMAGE,), (3, 8, 4, 4)),
    (GlobalAveragePool((3, 8, 1, 1)), (IMAGE,), (3, 8, 1, 1)),
    (Interpolate((3, 8, 12, 10), "nearest", False, (2.0, 2.0)), (IMAGE,), (3, 8, 12, 10)),
    (Interpolate((3, 8, 9, 3), "cubic", True, (None, None)), (IMAGE,), (3, 8, 9, 3)),
    (Interpolate((3, 8, 12, 10), None, False, (2.0, 2.0)), (IMAGE,), (3, 8, 12, 10)),
    (Pad((3, 8, 7, 8), ((0, 0), (0, 0), (2, -1), (1, 2)), "constant"), (IMAGE,), (3, 8, 7, 8)),
    (Pad((3, 8, 9, 8), ((0, 0), (0, 0), (2, 1), (1, 2)), "reflect"), (IMAGE,), (3, 8, 9, 8)),
    (Pad((3, 9, 6, 5), ((0, 0), (-3, 4), (0, 0), (0, 0)), "constant"), (IMAGE,), (3, 9, 6, 5)),
    (PixelUnshuffle((3, 32, 3, 2), 2), ((3, 8, 6, 4),), (3, 32, 3, 2)),
    (PixelShuffle((3, 2, 12, 10), 2), (IMAGE,), (3, 2, 12, 10)),
    (Reshape((3, 240)), (IMAGE,), (3, 240)),
    (Reshape((3, 48, 5)), (IMAGE,), (3, 48, 5)),
    (Reshape((3, 2, 4, 1, 30)), (IMAGE,), (3, 2, 4, 1, 30)),
    (View((4, 3, 1, 5, 8), ((0, 3), (0, 8), (1, 5), (0, 5)), (2, 0, None, 3, 1)), (IMAGE,), (4, 3, 1, 5, 8)),
    (View((3, 2, 5), ((0, 3), (6, 8), (4, 5), (0, 5)), (0, 1, 3)), (IMAGE,), (3, 2, 5)),
    (Pieces((View((3, 8, 2, 5), ((0, 3), (0, 8), (0, 2), (0, 5)), (0, 1, 2, 3)),), 2), (IMAGE,), (3, 8, 2, 5)),
    (Stack((3, 8, 2, 6, 5), 2), (IMAGE, IMAGE), (3, 8, 2, 6, 5)),
    (Reduction((3, 8), (2, 3), False, True), (IMAGE,), (3, 8)),
    (Reduction((3, 1, 6, 5), (1,), True, False), (IMAGE,), (3, 1, 6, 5)),
    (Softmax(IMAGE, 1), (IMAGE,), IMAGE),
    (Cat((3, 16, 6, 5), 1), (IMAGE, IMAGE), (3, 16, 6, 5)),
    (Cat((3, 8, 6, 7), 3), ((3, 8, 6, 2), IMAGE), (3, 8, 6, 7)),
    (Gather((3, 5)), (IMAGE, (5, 5)), (3, 5)),
]


@pytest.mark.parametrize("case", OPERATORS, ids=lambda c: f"{type(c[0]).__name__}{len(c[1])}")
def test_an_operator_yields_every_element_once(case: tuple[Op, tuple[tuple[int, ...], ...], tuple[int, ...]]) -> None:
    op, shapes, shape = case

    @given(st.data(), worlds)
    def law(data: st.DataObject, world: int) -> None:
        inputs = tuple(data.draw(layouts(s, world)) for s in shapes)
        assert_fits(op.step(inputs, REPLICATE), inputs, shape)

    law()


@pytest.mark.parametrize("case", OPERATORS, ids=lambda c: f"{type(c[0]).__name__}{len(c[1])}")
def test_replicated_inputs_give_a_replicated_output(
    case: tuple[Op, tuple[tuple[int, ...], ...], tuple[int, ...]],
) -> None:
    op, shapes, shape = case
    inputs = tuple(Layout.replicated(s, 3) for s in shapes)
    assert op.step(inputs, REPLICATE).output == Layout.replicated(shape, 3)


@given(st.data(), convolutions(), st.sampled_from(KINDS), worlds)
def test_a_convolution_under_any_split_yields_every_element_once(
    data: st.DataObject, op: Conv, kind: SplitKind, world: int
) -> None:
    assume(op.spec.P > 0 and op.spec.Q > 0)
    split = split_of(op, kind, data.draw(weights(world)))
    op.check(split, world)
    x = data.draw(layouts(op.spec.x_shape, world))
    assert_fits(op.step((x,), split), (x,), op.spec.y_shape)


@given(st.data(), convolutions(), st.sampled_from(["height", "width"]), worlds)
def test_rows_in_proportion_read_the_rows_of_their_windows(
    data: st.DataObject, op: Conv, kind: SplitKind, world: int
) -> None:
    assume(op.spec.P > 0 and op.spec.Q > 0)
    ratio, dim = data.draw(weights(world)), {"height": 2, "width": 3}[kind]
    step = op.step((Layout.replicated(op.spec.x_shape, world),), Split(kind, ratio))
    assert tuple(box.shape[dim] for box in step.output.boxes) == apportion(op.spec.y_shape[dim], ratio)
    window = op.spec.windows[dim - 2]
    for read, out in zip(step.reads[0].boxes, step.output.boxes, strict=True):
        reads = window.reads((out.lo[dim], out.hi[dim]), op.spec.x_shape[dim])
        assert (read.lo[dim], read.hi[dim]) == reads


@given(st.data(), convolutions(), worlds)
def test_own_filters_read_the_channels_of_their_groups(data: st.DataObject, op: Conv, world: int) -> None:
    assume(op.spec.P > 0 and op.spec.Q > 0)
    split = Split("filter", data.draw(sizes(op.spec.K, world)))
    (need,) = op.step((Layout.replicated(op.spec.x_shape, world),), split).reads
    C, K, groups = op.spec.C, op.spec.K, op.spec.groups
    for (a, b), box in zip(spans(split.sizes), need.boxes, strict=True):
        channels = {c for k in range(a, b) for c in range(C) if c * groups // C == k * groups // K}
        assert channels == set(range(box.lo[1], box.hi[1]))


@given(st.data(), worlds)
def test_whole_groups_of_channels_are_cut_by_their_filters(data: st.DataObject, world: int) -> None:
    op = Conv(replace(SPEC, C=6, K=12, groups=3))
    groups = data.draw(sizes(3, world))
    split = Split("channel", tuple(2 * g for g in groups))
    assert op.canonical(split) == Split("filter", tuple(4 * g for g in groups))
    assert op.weight_cut(split) == (0, tuple(4 * g for g in groups))
    assert op.step((Layout.replicated(op.spec.x_shape, world),), split).output.kind == "sharded"


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        ("filter", (0, (9, 3))),
        ("channel", (1, (9, 3))),
        ("height", None),
        ("width", None),
        ("sample", None),
        ("replicate", None),
    ],
)
def test_weights_are_cut_by_filters_and_channels(kind: SplitKind, cut: tuple[int, tuple[int, ...]] | None) -> None:
    split = Split(kind, () if kind == "replicate" else (9, 3))
    assert Conv(replace(SPEC, C=12)).weight_cut(split) == cut
    assert Linear((4, 12), 12).weight_cut(split) == cut


@pytest.mark.parametrize(
    ("kind", "cut"),
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
def test_a_split_without_sense_is_refused(kind: SplitKind, cut: tuple[int, ...]) -> None:
    with pytest.raises(SplitError, match=kind):
        Split(kind, cut)


def test_sizes_may_be_given_as_a_list() -> None:
    assert Split("filter", [1, 2]) == Split("filter", (1, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "split", "match"),
    [
        (Conv(SPEC), Split("filter", (6, 6, 0)), "3 sizes for 2 ranks"),
        (Conv(SPEC), Split("filter", (6, 5)), "11.* 12 filters"),
        (Conv(SPEC), Split("channel", (6, 6)), "12.* 8 input channels"),
        (Conv(replace(SPEC, groups=2)), Split("channel", (3, 5)), "through the groups"),
        (Linear((4, 6), 8), Split("height", (1, 1)), "no height"),
        (Linear((6,), 8), Split("sample", (1, 1)), "no sample"),
        (Linear((4, 6), 8), Split("filter", (8,)), "1 sizes for 2 ranks"),
        (Linear((4, 6), 8), Split("filter", (4, 5)), "8 features"),
        (Linear((4, 6), 8), Split("channel", (4, 4)), "6 features"),
    ],
)
def test_a_split_that_does_not_fit_its_operator_is_refused(op: Conv | Linear, split: Split, match: str) -> None:
    with pytest.raises(SplitError, match=match) as error:
        op.check(split, 2)
    assert isinstance(error.value, HetConvError)


@pytest.mark.parametrize("op", [Conv(SPEC), Linear((4, 6), 8)])
def test_replicate_fits_any_number_of_ranks(op: Conv | Linear) -> None:
    op.check(REPLICATE, 7)
    x = Layout.replicated(SPEC.x_shape if isinstance(op, Conv) else op.x_shape, 7)
    assert op.step((x,), REPLICATE).output.kind == "replicated"


@pytest.mark.parametrize(
    ("kind", "ratio", "output"),
    [
        ("filter", (6, 2), Layout.sharded((5, 4, 8), 2, (6, 2))),
        ("channel", (6, 0), Layout.partial((5, 4, 8), 2, (6, 0))),
        ("sample", (3, 1), Layout.sharded((5, 4, 8), 0, (4, 1))),
    ],
)
def test_a_linear_layer_on_more_dimensions(kind: SplitKind, ratio: tuple[int, ...], output: Layout) -> None:
    step = Linear((5, 4, 6), 8).step((Layout.replicated((5, 4, 6), 2),), Split(kind, ratio))
    assert step.output == output


def test_a_partial_sum_is_scattered_over_channels_in_its_shares() -> None:
    assert on_parts(Layout.partial((3, 8, 2, 2), 2, (3, 1))) == Layout.sharded((3, 8, 2, 2), 1, (6, 2))


def test_a_partial_vector_has_no_channels_to_scatter() -> None:
    assert on_parts(Layout.partial((8,), 2)) == Layout.replicated((8,), 2)


def test_filter_then_channel_needs_no_exchange_between() -> None:
    """What the first yields is what the second reads, so that two convolutions share one reduction."""
    first, second = Conv(SPEC), Conv(Conv2dSpec(3, 12, 5, 7, 4, 1, 1))
    made = first.step((Layout.replicated(SPEC.x_shape, 2),), Split("filter", (9, 3))).output
    assert second.step((made,), Split("channel", (9, 3))).reads == (made,)


@pytest.mark.parametrize(("dim", "forward", "backward"), [(0, 1, 1), (1, 1, 0), (2, 1, 1), (3, 1, 1)])
def test_batch_norm_moves_statistics_in_training_alone(dim: int, forward: int, backward: int) -> None:
    x = Layout.sharded(IMAGE, dim, apportion(IMAGE[dim], (3, 1)))
    step = BatchNorm(IMAGE, True, True).step((x,))
    assert (len(step.forward), len(step.backward)) == (forward, backward)
    evaluating = BatchNorm(IMAGE, False, False).step((x,))
    assert (evaluating.forward, evaluating.backward) == ((), ())


def test_own_channels_without_running_statistics_move_nothing() -> None:
    step = BatchNorm(IMAGE, True, False).step((Layout.sharded(IMAGE, 1, (5, 3)),))
    assert (step.forward, step.backward) == ((), ())


@given(st.data(), worlds, st.lists(st.integers(1, 4), min_size=2, max_size=5))
def test_flattened_parts_are_parts_of_the_flattened(data: st.DataObject, world: int, lengths: list[int]) -> None:
    shape = tuple(lengths)
    start = data.draw(st.integers(0, len(shape) - 2))
    end = data.draw(st.integers(start + 1, len(shape) - 1))
    x = data.draw(layouts(shape, world))
    flat = (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :])
    step = Reshape(flat).step((x,))
    numbers = np.arange(prod(shape))
    for read, out in zip(step.reads[0].boxes, step.output.boxes, strict=True):
        part = numbers.reshape(shape)[read.within(Box.whole(shape))]
        assert (part.reshape(out.shape) == numbers.reshape(flat)[out.within(Box.whole(flat))]).all()


@given(st.data(), worlds, st.permutations([IMAGE, (8, 1, 1), (3, 1, 6, 1), (1, 1, 1, 1), (5,)]))
def test_a_join_reads_what_broadcasting_pairs(data: st.DataObject, world: int, shapes: list[tuple[int, ...]]) -> None:
    inputs = tuple(data.draw(layouts(shape, world)) for shape in shapes)
    step = Pointwise(IMAGE).step(inputs)
    assume(step.output.kind == "sharded")
    index = np.arange(prod(IMAGE)).reshape(IMAGE)
    for rank, out in enumerate(step.output.boxes):
        for read, shape in zip(step.reads, shapes, strict=True):
            source = np.arange(prod(shape)).reshape(shape)
            expected = np.broadcast_to(source, IMAGE)[out.within(Box.whole(IMAGE))]
            part = source[read.boxes[rank].within(Box.whole(shape))]
            assert out.numel == 0 or (np.broadcast_to(part, out.shape) == expected).all()
        assert index[out.within(Box.whole(IMAGE))].shape == out.shape


def test_a_join_follows_its_first_input_that_is_cut() -> None:
    rows, columns = Layout.sharded(IMAGE, 2, (4, 2)), Layout.sharded(IMAGE, 3, (4, 1))
    assert Pointwise(IMAGE).step((Layout.replicated(IMAGE, 2), columns, rows)).output == columns


def test_a_cut_where_the_input_is_broadcast_is_not_followed() -> None:
    stretched = Layout.sharded((3, 1, 1, 1), 1, (1, 0))
    assert Pointwise(IMAGE).step((stretched,)).output == Layout.replicated(IMAGE, 2)


def test_a_pool_over_rows_reads_a_halo() -> None:
    pool = Pool("average", (1, 1, 8, 4), (Window(3, 1, 1, 1, 1),) * 2)
    (need,) = pool.step((Layout.sharded((1, 1, 8, 4), 2, (6, 2)),)).reads
    assert isinstance(need, Need)
    assert [(b.lo[2], b.hi[2]) for b in need.boxes] == [(0, 7), (5, 8)]
