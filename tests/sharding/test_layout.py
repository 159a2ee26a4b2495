"""Boxes, layouts, apportionment and the pieces that move."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetconv.errors import LayoutError
from hetconv.sharding.layout import Box, Boxes, Layout, ReadRegion, apportion, spans
from hetconv.sharding.moves import (
    Exchange,
    Move,
    buckets,
    bytes_per_pair,
    exchanges,
    overlaps,
)
from tests.strategies import (
    boxes,
    layouts,
    read_regions,
    shapes,
    sharded,
    sizes,
    weights,
    worlds,
)

Shape = tuple[int, ...]


def mask(box: Box, shape: Shape) -> np.ndarray:
    """One where the box is."""
    found = np.zeros(shape, dtype=int)
    found[box.slices_in(Box.whole(shape))] = 1
    return found


def performed(
    rounds: tuple[Exchange, ...], local: list[np.ndarray]
) -> list[np.ndarray]:
    """The definition of an exchange: everyone who wants an element gets the sum over
    all who hold it.
    """
    for held, wanted in rounds:
        new = [np.zeros(box.shape, dtype=int) for box in wanted]
        for s, r, box in overlaps(held, wanted):
            new[r][box.slices_in(wanted[r])] += local[s][box.slices_in(held[s])]
        local = new
    return local


@given(st.data(), st.integers(0, 1000), st.integers(1, 6), st.integers(1, 8))
def test_apportioned_sizes_add_up(
    data: st.DataObject, total: int, world: int, granularity: int
) -> None:
    assert sum(apportion(total, data.draw(weights(world)), granularity)) == total


@given(st.data(), st.integers(0, 1000), st.integers(1, 6), st.integers(1, 8))
def test_a_zero_weight_gets_nothing(
    data: st.DataObject, total: int, world: int, granularity: int
) -> None:
    given_weights = data.draw(weights(world))
    found = apportion(total, given_weights, granularity)
    assert all(s >= 0 for s in found)
    assert all(s == 0 for s, w in zip(found, given_weights, strict=True) if w == 0)


@given(st.data(), st.integers(0, 1000), st.integers(1, 6))
def test_shares_are_within_one_unit_of_proportion(
    data: st.DataObject, total: int, world: int
) -> None:
    given_weights = data.draw(weights(world))
    exact = [total * w / sum(given_weights) for w in given_weights]
    assert all(
        abs(s - e) < 1
        for s, e in zip(apportion(total, given_weights), exact, strict=True)
    )


@given(st.data(), st.integers(0, 1000), st.integers(1, 6), st.integers(1, 8))
def test_cuts_lie_on_multiples_of_the_granularity(
    data: st.DataObject, total: int, world: int, granularity: int
) -> None:
    cuts = {
        hi for _, hi in spans(apportion(total, data.draw(weights(world)), granularity))
    } - {total}
    assert all(cut % granularity == 0 for cut in cuts)


@given(st.data(), st.integers(0, 1000), st.integers(2, 6))
def test_a_heavier_weight_gets_no_less(
    data: st.DataObject, total: int, world: int
) -> None:
    given_weights = data.draw(weights(world))
    by_weight = sorted(zip(given_weights, apportion(total, given_weights), strict=True))
    assert all(a[1] <= b[1] for a in by_weight for b in by_weight if a[0] < b[0])


@given(st.data(), st.integers(0, 300), st.integers(1, 6), st.integers(1, 9))
def test_apportioning_in_proportion_to_shares_keeps_them(
    data: st.DataObject, total: int, world: int, factor: int
) -> None:
    shares = apportion(total + 1, data.draw(weights(world)))
    assert apportion(factor * (total + 1), shares) == tuple(factor * s for s in shares)


def test_the_ratio_that_does_not_divide_the_filters() -> None:
    assert apportion(64, (40, 40, 20)) == (26, 25, 13)


@pytest.mark.parametrize(
    "given_weights",
    [(), (0, 0), (1, -1), (-1, 2), (float("nan"), 1.0), (float("inf"), 1.0)],
)
def test_apportion_refuses_weights_without_a_proportion(
    given_weights: tuple[float, ...],
) -> None:
    with pytest.raises(LayoutError, match="proportions"):
        apportion(10, given_weights)


@given(st.data(), shapes)
def test_an_intersection_holds_the_points_of_both(
    data: st.DataObject, shape: Shape
) -> None:
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    assert (mask(a.intersect(b), shape) == mask(a, shape) * mask(b, shape)).all()
    assert a.intersect(b).numel == (mask(a, shape) * mask(b, shape)).sum()


@given(st.data(), shapes)
def test_intersection_commutes(data: st.DataObject, shape: Shape) -> None:
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    assert a.intersect(b) == b.intersect(a)


@given(st.data(), shapes)
def test_a_box_within_another_indexes_the_same_elements(
    data: st.DataObject, shape: Shape
) -> None:
    outer = data.draw(boxes(shape))
    inner = outer.intersect(data.draw(boxes(shape)))
    numbers = np.arange(prod(shape)).reshape(shape)
    whole = Box.whole(shape)
    assert (
        numbers[outer.slices_in(whole)][inner.slices_in(outer)]
        == numbers[inner.slices_in(whole)]
    ).all()
    assert inner.shape == numbers[inner.slices_in(whole)].shape


@given(st.data(), shapes, worlds)
def test_sharded_boxes_cover_each_element_once(
    data: st.DataObject, shape: Shape, world: int
) -> None:
    layout = data.draw(sharded(shape, world))
    assert (sum(mask(box, shape) for box in layout.boxes) == 1).all()


@given(st.data(), shapes, worlds)
def test_a_sharded_layout_knows_its_cut(
    data: st.DataObject, shape: Shape, world: int
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    layout = Layout.sharded(
        shape, dim - len(shape), data.draw(sizes(shape[dim], world))
    )
    assert layout.dim is not None
    assert layout == Layout.sharded(shape, layout.dim, layout.sizes)


def test_a_grid_of_boxes_has_no_single_cut() -> None:
    grid = tuple(Box((r, c), (r + 1, c + 1)) for r in range(2) for c in range(2))
    assert Layout((2, 2), "sharded", grid).dim is None


def test_boxes_in_another_order_are_not_a_cut_in_rank_order() -> None:
    layout = Layout.sharded((4,), 0, (1, 3))
    assert Layout((4,), "sharded", layout.boxes[::-1]).dim is None


@pytest.mark.parametrize(
    ("dim", "cut", "match"),
    [
        (0, (2, 3), "add up to 5"),
        (0, (5, -1), "non-negative"),
        (1, (), "add up to 0"),
        (2, (2, 2), "dimension 2"),
        (-3, (2, 2), "dimension -3"),
    ],
)
def test_sharded_refuses_sizes_that_do_not_fit(
    dim: int, cut: tuple[int, ...], match: str
) -> None:
    with pytest.raises(LayoutError, match=match):
        Layout.sharded((4, 6), dim, cut)


@given(st.data(), shapes, worlds)
def test_pieces_of_a_sharded_value_cover_what_is_wanted_once(
    data: st.DataObject, shape: Shape, world: int
) -> None:
    held, wanted = (
        data.draw(sharded(shape, world)).boxes,
        data.draw(read_regions(shape, world)).boxes,
    )
    for rank, box in enumerate(wanted):
        came = sum(
            (mask(b, shape) for _, r, b in overlaps(held, wanted) if r == rank),
            np.zeros(shape, dtype=int),
        )
        assert (came == mask(box, shape)).all()


@given(st.data(), shapes, worlds)
def test_pieces_are_held_by_their_sender(
    data: st.DataObject, shape: Shape, world: int
) -> None:
    held, wanted = (
        data.draw(read_regions(shape, world)).boxes,
        data.draw(read_regions(shape, world)).boxes,
    )
    assert all(
        b.intersect(held[s]) == b and b.numel for s, _, b in overlaps(held, wanted)
    )


@given(st.data(), shapes, worlds, st.integers(0, 2**31))
def test_rounds_sum_what_is_held_into_what_is_wanted(
    data: st.DataObject, shape: Shape, world: int, seed: int
) -> None:
    held = data.draw(st.one_of(layouts(shape, world), read_regions(shape, world))).boxes
    wanted = data.draw(
        st.one_of(layouts(shape, world), read_regions(shape, world))
    ).boxes
    rng = np.random.default_rng(seed)
    local = [rng.integers(-9, 9, box.shape) for box in held]
    total = np.zeros(shape, dtype=int)
    for box, part in zip(held, local, strict=True):
        total[box.slices_in(Box.whole(shape))] += part
    for box, part in zip(
        wanted, performed(exchanges(held, wanted), local), strict=True
    ):
        assert (part == total[box.slices_in(Box.whole(shape))]).all()


@pytest.mark.parametrize("world", [3, 4, 7])
def test_a_sum_of_wholes_moves_two_tensors_less_two_shares(world: int) -> None:
    whole: Boxes = (Box.whole((2, 420)),) * world
    sent = bytes_per_pair(exchanges(whole, whole), itemsize=4)
    for rank in range(world):
        assert (
            sum(n for (s, _), n in sent.items() if s == rank)
            == 4 * 840 * 2 * (world - 1) // world
        )


def test_two_ranks_swap_their_summands_in_one_round() -> None:
    whole: Boxes = (Box.whole((5, 7)),) * 2
    assert exchanges(whole, whole) == ((whole, whole),)


def test_traffic_counts_bytes_between_ranks_alone() -> None:
    held = Layout.sharded((10,), 0, (6, 4)).boxes
    wanted = (Box((0,), (7,)), Box((5,), (10,)))
    assert bytes_per_pair(((held, wanted),), itemsize=2) == {(1, 0): 2, (0, 1): 2}


@given(st.data(), shapes, worlds)
def test_nothing_moves_from_a_replicated_value(
    data: st.DataObject, shape: Shape, world: int
) -> None:
    dst = data.draw(st.one_of(layouts(shape, world), read_regions(shape, world)))
    assert Move(Layout.replicated(shape, world), dst).forward == ()


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 100))
def test_buckets_hold_each_item_once_last_first(numels: list[int], limit: int) -> None:
    assert [i for group in buckets(numels, limit) for i in group] == list(
        reversed(range(len(numels)))
    )


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 100))
def test_a_bucket_is_closed_by_the_item_that_fills_it(
    numels: list[int], limit: int
) -> None:
    groups = buckets(numels, limit)
    assert all(sum(numels[i] for i in group[:-1]) < limit for group in groups)
    assert all(sum(numels[i] for i in group) >= limit for group in groups[:-1])


@given(
    st.lists(st.tuples(st.integers(1, 50), st.sampled_from("ab")), max_size=20),
    st.integers(1, 100),
)
def test_a_bucket_is_of_one_kind_and_filled_as_if_there_were_no_other(
    items: list[tuple[int, str]], limit: int
) -> None:
    groups = buckets([size for size, _ in items], limit, [kind for _, kind in items])
    assert [group[0] for group in groups] == sorted(
        (group[0] for group in groups), reverse=True
    )
    for kind in "ab":
        of_kind = [i for i, (_, k) in enumerate(items) if k == kind]
        alone = [
            [of_kind[i] for i in group]
            for group in buckets([items[i][0] for i in of_kind], limit)
        ]
        assert [group for group in groups if items[group[0]][1] == kind] == alone


def test_everything_is_needed_by_every_rank() -> None:
    assert ReadRegion.everything((2, 3), 2) == ReadRegion(
        (2, 3), (Box.whole((2, 3)),) * 2
    )
