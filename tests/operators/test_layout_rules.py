"""The rules of operators that follow their inputs, as laws over any layout."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hetconv.operators.base import reduce_scattered
from hetconv.operators.einsum import Contraction
from hetconv.operators.elementwise import Pointwise
from hetconv.operators.norms import BatchNorm, GroupNorm, LocalNorm
from hetconv.operators.pooling import AdaptivePool, GlobalAveragePool, Pool
from hetconv.operators.random import Dropout, Like, NoiseLike
from hetconv.operators.reductions import AlongDim, Extreme, Reduction
from hetconv.operators.resampling import CircularPad, Interpolate, Pad, PixelUnshuffle
from hetconv.operators.shapes import Cat, PixelShuffle, Reshape, Stack
from hetconv.operators.views import SplitView, View
from hetconv.sharding.conv_spec import Window
from hetconv.sharding.layout import Box, Layout, ReadRegion, apportion
from hetconv.sharding.rule import Gather, Operator
from hetconv.sharding.split import REPLICATE
from tests.sharding.test_layer_rules import assert_fits
from tests.strategies import layouts, worlds

IMAGE = (3, 8, 6, 5)

OPERATORS: list[tuple[Operator, tuple[tuple[int, ...], ...], tuple[int, ...]]] = [
    (Pointwise(IMAGE), (IMAGE,), IMAGE),
    (Pointwise(IMAGE), (IMAGE, IMAGE), IMAGE),
    (Pointwise(IMAGE), (IMAGE, (8, 1, 1)), IMAGE),
    (Pointwise(IMAGE), ((3, 8, 1, 1), IMAGE), IMAGE),
    (Pointwise(IMAGE), ((6, 1), (3, 1, 1, 5), (8, 1, 1)), IMAGE),
    (BatchNorm(IMAGE, True, True), (IMAGE,), IMAGE),
    (BatchNorm(IMAGE, False, False), (IMAGE,), IMAGE),
    (Pool("max", (3, 8, 3, 3), (Window(3, 2, 1, 1, 1),) * 2), (IMAGE,), (3, 8, 3, 3)),
    (
        Pool("average", (3, 8, 3, 3), (Window(2, 2), Window(2, 2, 1, 0, 1))),
        (IMAGE,),
        (3, 8, 3, 3),
    ),
    (Pool("other", (3, 8, 4, 4)), (IMAGE,), (3, 8, 4, 4)),
    (AdaptivePool("max", (3, 8, 4, 7)), (IMAGE,), (3, 8, 4, 7)),
    (AdaptivePool("average", (3, 8, 2, 3)), ((3, 8, 31, 33),), (3, 8, 2, 3)),
    (GlobalAveragePool((3, 8, 1, 1)), (IMAGE,), (3, 8, 1, 1)),
    (
        Interpolate((3, 8, 12, 10), "nearest", False, (2.0, 2.0)),
        (IMAGE,),
        (3, 8, 12, 10),
    ),
    (Interpolate((3, 8, 9, 3), "cubic", True, (None, None)), (IMAGE,), (3, 8, 9, 3)),
    (Interpolate((3, 8, 12, 10), None, False, (2.0, 2.0)), (IMAGE,), (3, 8, 12, 10)),
    (
        Pad((3, 8, 7, 8), ((0, 0), (0, 0), (2, -1), (1, 2)), "constant"),
        (IMAGE,),
        (3, 8, 7, 8),
    ),
    (
        Pad((3, 8, 9, 8), ((0, 0), (0, 0), (2, 1), (1, 2)), "reflect"),
        (IMAGE,),
        (3, 8, 9, 8),
    ),
    (
        Pad((3, 9, 6, 5), ((0, 0), (-3, 4), (0, 0), (0, 0)), "constant"),
        (IMAGE,),
        (3, 9, 6, 5),
    ),
    (
        Pad((3, 8, 11, 8), ((0, 0), (0, 0), (5, 0), (-1, 4)), "reflect"),
        (IMAGE,),
        (3, 8, 11, 8),
    ),
    (
        CircularPad((3, 8, 17, 8), ((0, 0), (0, 0), (5, 6), (0, 3)), "circular"),
        (IMAGE,) * 3,
        (3, 8, 17, 8),
    ),
    (
        CircularPad((3, 8, 6, 4), ((0, 0), (0, 0), (0, 0), (1, -2)), "circular"),
        (IMAGE,) * 3,
        (3, 8, 6, 4),
    ),
    (PixelUnshuffle((3, 32, 3, 2), 2), ((3, 8, 6, 4),), (3, 32, 3, 2)),
    (PixelShuffle((3, 2, 12, 10), 2), (IMAGE,), (3, 2, 12, 10)),
    (Reshape((3, 240)), (IMAGE,), (3, 240)),
    (Reshape((3, 48, 5)), (IMAGE,), (3, 48, 5)),
    (Reshape((3, 2, 4, 1, 30)), (IMAGE,), (3, 2, 4, 1, 30)),
    (
        View((4, 3, 1, 5, 8), ((0, 3), (0, 8), (1, 5), (0, 5)), (2, 0, None, 3, 1)),
        (IMAGE,),
        (4, 3, 1, 5, 8),
    ),
    (View((3, 2, 5), ((0, 3), (6, 8), (4, 5), (0, 5)), (0, 1, 3)), (IMAGE,), (3, 2, 5)),
    (
        View(
            (2, 8, 3, 2), ((0, 3), (0, 8), (1, 6), (1, 4)), (0, 1, 2, 3), (2, 1, 2, 2)
        ),
        (IMAGE,),
        (2, 8, 3, 2),
    ),
    (
        SplitView(
            (View((3, 8, 2, 5), ((0, 3), (0, 8), (0, 2), (0, 5)), (0, 1, 2, 3)),), 2
        ),
        (IMAGE,),
        (3, 8, 2, 5),
    ),
    (Stack((3, 8, 2, 6, 5), 2), (IMAGE, IMAGE), (3, 8, 2, 6, 5)),
    (Reduction((3, 8), (2, 3), False, True), (IMAGE,), (3, 8)),
    (Reduction((3, 1, 6, 5), (1,), True, False), (IMAGE,), (3, 1, 6, 5)),
    (Extreme((3, 1, 6, 1), (1, 3), True, False, True), (IMAGE,), (3, 1, 6, 1)),
    (AlongDim(IMAGE, (1,)), (IMAGE,), IMAGE),
    (Cat((3, 16, 6, 5), 1), (IMAGE, IMAGE), (3, 16, 6, 5)),
    (Cat((3, 8, 6, 7), 3), ((3, 8, 6, 2), IMAGE), (3, 8, 6, 7)),
    (Cat((3, 8, 14, 5), 2), (IMAGE, (3, 8, 2, 5), IMAGE), (3, 8, 14, 5)),
    (Dropout(IMAGE, 2), (IMAGE,), IMAGE),
    (Like(IMAGE), (IMAGE,), IMAGE),
    (NoiseLike(IMAGE), (IMAGE,), IMAGE),
    (
        Contraction((3, 6, 8), (tuple("nchw"), (None, "w")), tuple("nhc")),
        (IMAGE, (1, 5)),
        (3, 6, 8),
    ),
    (Gather((3, 5)), (IMAGE, (5, 5)), (3, 5)),
]


@pytest.mark.parametrize(
    "case", OPERATORS, ids=lambda c: f"{type(c[0]).__name__}{len(c[1])}"
)
def test_an_operator_yields_every_element_once(
    case: tuple[Operator, tuple[tuple[int, ...], ...], tuple[int, ...]],
) -> None:
    op, shapes, shape = case

    @given(st.data(), worlds)
    def law(data: st.DataObject, world: int) -> None:
        inputs = tuple(data.draw(layouts(s, world)) for s in shapes)
        assert_fits(op.sharding(inputs, REPLICATE), inputs, shape)

    law()


@pytest.mark.parametrize(
    "case", OPERATORS, ids=lambda c: f"{type(c[0]).__name__}{len(c[1])}"
)
def test_replicated_inputs_give_a_replicated_output(
    case: tuple[Operator, tuple[tuple[int, ...], ...], tuple[int, ...]],
) -> None:
    op, shapes, shape = case
    inputs = tuple(Layout.replicated(s, 3) for s in shapes)
    assert op.sharding(inputs, REPLICATE).output == Layout.replicated(shape, 3)


def test_a_partial_sum_is_scattered_over_channels_in_its_shares() -> None:
    assert reduce_scattered(Layout.partial((3, 8, 2, 2), 2, (3, 1))) == Layout.sharded(
        (3, 8, 2, 2), 1, (6, 2)
    )


def test_a_partial_vector_has_no_channels_to_scatter() -> None:
    assert reduce_scattered(Layout.partial((8,), 2)) == Layout.replicated((8,), 2)


@pytest.mark.parametrize(
    ("dim", "forward", "backward"), [(0, 1, 1), (1, 0, 0), (2, 1, 1), (3, 1, 1)]
)
def test_batch_norm_moves_statistics_in_training_alone(
    dim: int, forward: int, backward: int
) -> None:
    x = Layout.sharded(IMAGE, dim, apportion(IMAGE[dim], (3, 1)))
    sharding = BatchNorm(IMAGE, True, True).sharding((x,))
    assert (len(sharding.forward_moves), len(sharding.backward_moves)) == (
        forward,
        backward,
    )
    assert sharding.shared_stats == (
        (2 * 6, 2 * 2) if dim == 1 else ()
    )  # at the end of the forward
    evaluating = BatchNorm(IMAGE, False, False).sharding((x,))
    assert (
        evaluating.forward_moves,
        evaluating.backward_moves,
        evaluating.shared_stats,
    ) == ((), (), ())


def test_own_channels_without_running_statistics_move_nothing() -> None:
    sharding = BatchNorm(IMAGE, True, False).sharding(
        (Layout.sharded(IMAGE, 1, (5, 3)),)
    )
    assert (sharding.forward_moves, sharding.backward_moves, sharding.shared_stats) == (
        (),
        (),
        (),
    )


@given(st.data(), worlds, st.lists(st.integers(1, 4), min_size=2, max_size=5))
def test_flattened_shards_are_shards_of_the_flattened_tensor(
    data: st.DataObject, world: int, lengths: list[int]
) -> None:
    shape = tuple(lengths)
    start = data.draw(st.integers(0, len(shape) - 2))
    end = data.draw(st.integers(start + 1, len(shape) - 1))
    x = data.draw(layouts(shape, world))
    flat = (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :])
    sharding = Reshape(flat).sharding((x,))
    numbers = np.arange(prod(shape))
    for read, out in zip(
        sharding.input_layouts[0].boxes, sharding.output.boxes, strict=True
    ):
        part = numbers.reshape(shape)[read.slices_in(Box.whole(shape))]
        assert (
            part.reshape(out.shape)
            == numbers.reshape(flat)[out.slices_in(Box.whole(flat))]
        ).all()


@given(
    st.data(),
    worlds,
    st.permutations([IMAGE, (8, 1, 1), (3, 1, 6, 1), (1, 1, 1, 1), (5,)]),
)
def test_a_pointwise_operator_reads_what_broadcasting_pairs(
    data: st.DataObject, world: int, shapes: list[tuple[int, ...]]
) -> None:
    inputs = tuple(data.draw(layouts(shape, world)) for shape in shapes)
    sharding = Pointwise(IMAGE).sharding(inputs)
    assume(sharding.output.kind == "sharded")
    index = np.arange(prod(IMAGE)).reshape(IMAGE)
    for rank, out in enumerate(sharding.output.boxes):
        for read, shape in zip(sharding.input_layouts, shapes, strict=True):
            source = np.arange(prod(shape)).reshape(shape)
            expected = np.broadcast_to(source, IMAGE)[out.slices_in(Box.whole(IMAGE))]
            part = source[read.boxes[rank].slices_in(Box.whole(shape))]
            assert (
                out.numel == 0 or (np.broadcast_to(part, out.shape) == expected).all()
            )
        assert index[out.slices_in(Box.whole(IMAGE))].shape == out.shape


def test_a_pointwise_operator_follows_its_first_sharded_input() -> None:
    rows, columns = Layout.sharded(IMAGE, 2, (4, 2)), Layout.sharded(IMAGE, 3, (4, 1))
    assert (
        Pointwise(IMAGE).sharding((Layout.replicated(IMAGE, 2), columns, rows)).output
        == columns
    )


def test_an_input_that_is_broadcast_where_it_is_split_is_not_followed() -> None:
    broadcast = Layout.sharded((3, 1, 1, 1), 1, (1, 0))
    assert Pointwise(IMAGE).sharding((broadcast,)).output == Layout.replicated(IMAGE, 2)


def test_a_pool_over_rows_reads_a_halo() -> None:
    pool = Pool("average", (1, 1, 8, 4), (Window(3, 1, 1, 1, 1),) * 2)
    (need,) = pool.sharding((Layout.sharded((1, 1, 8, 4), 2, (6, 2)),)).input_layouts
    assert isinstance(need, ReadRegion)
    assert [(b.lo[2], b.hi[2]) for b in need.boxes] == [(0, 7), (5, 8)]


@given(st.data(), worlds, st.sampled_from([1, 2, 4, 8]))
def test_shares_of_groups_are_counts_of_their_elements(
    data: st.DataObject, world: int, groups: int
) -> None:
    op, x = GroupNorm((3, 8, 6, 5), groups), data.draw(layouts((3, 8, 6, 5), world))
    sharding = op.sharding((x,))
    assert sharding.output.kind == "replicated" or sharding.input_layouts == (
        sharding.output,
    )
    if not sharding.forward_moves:
        return
    owner = np.full(op.shape, -1)
    for rank, box in enumerate(sharding.output.boxes):
        owner[box.slices_in(Box.whole(op.shape))] = rank
    of_a_group = owner.reshape(3, groups, -1)
    for rank, shares in enumerate(op.shares(sharding.output)):
        box = sharding.output.boxes[rank]
        for group, share in enumerate(shares):
            held = {
                int((of_a_group[n, group] == rank).sum())
                for n in range(box.lo[0], box.hi[0])
            }
            assert held <= {round(share * of_a_group.shape[2], 9)}


@pytest.mark.parametrize(
    ("dim", "sizes", "messages"),
    [
        (0, (2, 1), 0),
        (1, (4, 4), 0),
        (1, (8, 0), 0),
        (1, (5, 3), 1),
        (1, (2, 6), 1),
        (2, (6, 0), 1),
        (3, (1, 4), 1),
    ],
)
def test_ranks_that_share_a_group_exchange_two_numbers_of_it(
    dim: int, sizes: tuple[int, int], messages: int
) -> None:
    shape = (3, 8, 6, 5)
    sharding = GroupNorm(shape, 2).sharding((Layout.sharded(shape, dim, sizes),))
    assert (len(sharding.forward_moves), len(sharding.backward_moves)) == (
        messages,
        messages,
    )
    assert sharding.partial_grads
    assert all(
        move.src.shape[-1] == 3 * 2
        for move in (*sharding.forward_moves, *sharding.backward_moves)
    )


@pytest.mark.parametrize(
    ("dim", "local"), [(0, True), (1, True), (2, False), (3, False)]
)
def test_a_norm_over_whole_dimensions_stays_where_it_is(dim: int, local: bool) -> None:
    shape = (3, 8, 6, 5)
    x = Layout.sharded(shape, dim, (shape[dim], 0))
    assert LocalNorm(shape, (2, 3)).sharding((x,)).output == (
        x if local else Layout.replicated(shape, 2)
    )
