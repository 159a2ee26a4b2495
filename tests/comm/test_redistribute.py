"""redistribute: its result by definition, and its backward by the adjoint identity, for
every kind of movement.

Inner products: a replicated value counts once, a sharded one sums over ranks, a partial
value is the sum of its summands (its cotangent is replicated), and the cotangent of a
need is one contribution per rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hetconv
from hetconv.comm import rank_group
from hetconv.comm.rank_group import count_sent, rank_group_of, through_backend
from hetconv.comm.redistribute import redistribute
from hetconv.errors import HetConvError, LayoutError
from hetconv.sharding.hierarchical import HierarchicalLayout
from hetconv.sharding.layout import Box, Layout, ReadRegion
from hetconv.sharding.moves import Move, bytes_per_pair
from tests.spawn import on_ranks
from tests.strategies import layouts, read_regions, shapes, sharded, worlds

Place = Layout | ReadRegion
Case = tuple[Layout, Place]


def drawn(seed: int, place: Place, cotangent: bool = False) -> list[Tensor]:
    """A random value over ``place``, one part per rank. The cotangent of a partial
    value is replicated.
    """
    generator = torch.Generator().manual_seed(seed)
    kind = place.kind if isinstance(place, Layout) else "need"
    whole = {box.shape for box in place.boxes} == {
        place.shape
    }  # of summands within nodes each has its own part
    if kind == "replicated" or (kind == "partial" and cotangent and whole):
        return [
            torch.randn(place.shape, dtype=torch.float64, generator=generator)
        ] * place.world
    return [
        torch.randn(box.shape, dtype=torch.float64, generator=generator)
        for box in place.boxes
    ]


def inner(place: Place, a: list[Tensor], b: list[Tensor]) -> float:
    counted = (
        1 if isinstance(place, Layout) and place.kind == "replicated" else place.world
    )
    return sum(float((x * y).sum()) for x, y in list(zip(a, b, strict=True))[:counted])


def value(place: Place, parts: list[Tensor]) -> Tensor:
    """The global tensor that parts stand for."""
    if isinstance(place, Layout) and place.kind == "replicated":
        return parts[0]
    whole = torch.zeros(place.shape, dtype=torch.float64)
    for box, part in zip(place.boxes, parts, strict=True):
        whole[box.slices_in(Box.whole(place.shape))] += part
    return whole


def forward_and_back(
    src: Layout, dst: Place, x: list[Tensor], y: list[Tensor]
) -> tuple[Tensor, Tensor, Any, Any]:
    """This rank's part of Fx and of F*y, and the bytes that it sent for each."""
    rank = dist.get_rank()
    local = x[rank].clone().requires_grad_()
    with count_sent() as there:
        fx = redistribute(local, src, dst)
    with count_sent() as back:
        (g,) = torch.autograd.grad(fx, local, y[rank])
    return fx.detach(), g, there, back


def both(
    case: Case,
) -> tuple[
    list[Tensor], list[Tensor], list[tuple[Tensor, Tensor, Counter[int], Counter[int]]]
]:
    src, dst = case
    x, y = drawn(1, src), drawn(2, dst, cotangent=True)
    return x, y, on_ranks(src.world, forward_and_back, src, dst, x, y)


def rank_on_backend(
    src: Layout, dst: Place, x: list[Tensor], y: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The same as if every rank were on a host of its own."""
    with through_backend():
        return forward_and_back(src, dst, x, y)[:2]


def rank_on_two_hosts(
    src: Layout, dst: Place, x: list[Tensor], y: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The same as if even ranks were on one host, and odd ones on another."""
    group = rank_group_of()
    near = {
        peer: channel
        for peer, channel in group.channels.items()
        if peer % 2 == group.rank % 2
    }
    rank_group._groups[group.process_group] = replace(
        group, channels=near, one_host=False
    )
    try:
        return forward_and_back(src, dst, x, y)[:2]
    finally:
        rank_group._groups[group.process_group] = group


def places(shape: tuple[int, ...], world: int) -> st.SearchStrategy[Place]:
    return st.one_of(layouts(shape, world), read_regions(shape, world))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape, world = draw(shapes), draw(worlds)
    src = draw(layouts(shape, world))
    return src, draw(
        places(shape, world).filter(lambda dst: not _in_nodes(dst) or dst == src)
    )


def _in_nodes(dst: Place) -> bool:
    """Whether it is summands in each node, which nothing can be moved to."""
    return isinstance(dst, HierarchicalLayout) and dst.kind == "partial"


@st.composite
def replicated_to_need(draw: st.DrawFn) -> Case:
    shape, world = draw(shapes), draw(worlds)
    return Layout.replicated(shape, world), draw(read_regions(shape, world))


@st.composite
def sharded_to(draw: st.DrawFn, kind: str) -> Case:
    shape, world = draw(shapes), draw(worlds)
    dst = {
        "replicated": st.just(Layout.replicated(shape, world)),
        "partial": st.just(Layout.partial(shape, world)),
        "sharded": sharded(shape, world),
        "need": read_regions(shape, world),
    }
    return draw(sharded(shape, world)), draw(dst[kind])


@st.composite
def partial_to(draw: st.DrawFn, kind: str) -> Case:
    shape, world = draw(shapes), draw(worlds)
    dst = {
        "replicated": st.just(Layout.replicated(shape, world)),
        "sharded": sharded(shape, world),
        "need": read_regions(shape, world),
    }
    return Layout.partial(shape, world), draw(dst[kind])


@st.composite
def replicated_to_partial(draw: st.DrawFn) -> Case:
    shape, world = draw(shapes), draw(worlds)
    return Layout.replicated(shape, world), Layout.partial(shape, world)


def check_identity(case: Case) -> None:
    src, dst = case
    x, y, found = both(case)
    left = inner(dst, [fx for fx, *_ in found], y)
    right = inner(src, x, [g for _, g, *_ in found])
    scale = max(1.0, *(float(t.norm()) for t in (*x, *y))) ** 2
    assert abs(left - right) <= 1e-12 * scale


ROWS = {
    "replicated to need": replicated_to_need(),
    "all-gather": sharded_to("replicated"),
    "halo exchange": sharded_to("need"),
    "all-reduce": partial_to("replicated"),
    "reduce-scatter": partial_to("sharded"),
    "partial to need": partial_to("need"),
    "all-to-all": sharded_to("sharded"),
    "embedding of a replicated value": replicated_to_partial(),
    "embedding of a sharded value": sharded_to("partial"),
}


@pytest.mark.parametrize("row", ROWS)
def test_backward_is_the_adjoint(row: str) -> None:
    @settings(max_examples=40)
    @given(ROWS[row])
    def law(case: Case) -> None:
        check_identity(case)

    law()


@given(cases())
def test_backward_of_any_move_is_the_adjoint(case: Case) -> None:
    check_identity(case)


@given(cases())
def test_forward_keeps_the_value(case: Case) -> None:
    src, dst = case
    x, _, found = both(case)
    whole = value(src, x)
    if isinstance(dst, Layout) and dst.kind == "partial":
        torch.testing.assert_close(
            value(dst, [fx for fx, *_ in found]), whole, rtol=0, atol=1e-12
        )
        return
    for box, (fx, *_) in zip(dst.boxes, found, strict=True):
        torch.testing.assert_close(
            fx, whole[box.slices_in(Box.whole(dst.shape))], rtol=0, atol=1e-12
        )


@given(cases())
def test_replicas_hold_the_same_bits(case: Case) -> None:
    src, dst = case
    *_, found = both(case)
    for place, parts in ((dst, [f[0] for f in found]), (src, [f[1] for f in found])):
        if isinstance(place, Layout) and place.kind == "replicated":
            assert all(torch.equal(part, parts[0]) for part in parts)


@pytest.mark.parametrize("world", [3, 4])
def test_overlapping_contributions_are_summed_in_one_order(world: int) -> None:
    whole = Box.whole((7, 101))
    need = ReadRegion(whole.hi, (whole,) * (world - 1) + (whole.with_range(1, 0, 90),))
    *_, found = both((Layout.replicated(whole.hi, world), need))
    assert all(torch.equal(g, found[0][1]) for _, g, *_ in found)


@given(cases())
def test_sent_bytes_are_those_of_the_geometry(case: Case) -> None:
    src, dst = case
    move = Move(src, dst)
    same = isinstance(dst, Layout) and (src.kind, src.boxes) == (dst.kind, dst.boxes)
    forward, adjoint = bytes_per_pair(move.forward, 8), bytes_per_pair(move.adjoint, 8)
    *_, found = both(case)
    sent = {
        (r, peer): n
        for r, (_, _, there, _) in enumerate(found)
        for peer, n in there.items()
    }
    sent_back = {
        (r, peer): n
        for r, (_, _, _, back) in enumerate(found)
        for peer, n in back.items()
    }
    assert sent == ({} if same else forward)
    assert sent_back == ({} if same else adjoint)


@pytest.mark.parametrize("rank", [rank_on_backend, rank_on_two_hosts])
@settings(max_examples=40)
@given(case=cases())
def test_other_transports_give_the_same_bits(
    rank: Callable[..., tuple[Tensor, Tensor]], case: Case
) -> None:
    src, dst = case
    x, y, found = both(case)
    for (fx, g, *_), other in zip(
        found, on_ranks(src.world, rank, src, dst, x, y), strict=True
    ):
        assert torch.equal(fx, other[0])
        assert torch.equal(g, other[1])


def rank_refusing(src: Layout, dst: Place, shape: tuple[int, ...]) -> tuple[str, str]:
    try:
        redistribute(torch.zeros(shape), src, dst)
    except HetConvError as e:
        return type(e).__name__, str(e)
    return "none", ""


@pytest.mark.parametrize(
    ("src", "dst", "match"),
    [
        (Layout.replicated((4,), 3), Layout.replicated((4,), 3), "for 3 and 3 ranks"),
        (Layout.replicated((4,), 2), Layout.replicated((5,), 2), r"shape \(5,\)"),
        (Layout.sharded((4,), 0, (4, 0)), Layout.replicated((4,), 2), "rank 1's box"),
    ],
)
def test_what_does_not_fit_is_refused_by_every_rank(
    src: Layout, dst: Place, match: str
) -> None:
    said = on_ranks(2, rank_refusing, src, dst, (4,))
    assert {kind for kind, _ in said} == {LayoutError.__name__}
    with pytest.raises(LayoutError, match=match):
        raise LayoutError(said[0][1])
    assert said[0] == said[1]


def memory_shared() -> bool:
    x = torch.zeros(4)
    layout = Layout.replicated((4,), 2)
    return redistribute(x, layout, layout).data_ptr() == x.data_ptr()


def test_the_result_never_shares_memory_with_the_argument() -> None:
    assert on_ranks(2, memory_shared) == [False, False]


def within_a_group() -> tuple[list[float], int]:
    """Ranks 3 and 1 of 4 exchange, in the order of their group."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return [], -1
    src, dst = Layout.sharded((3,), 0, (1, 2)), Layout.replicated((3,), 2)
    me = dist.get_rank(group)
    local = torch.tensor([[1.0], [2.0, 3.0]][me])
    return hetconv.redistribute(local, src, dst, group=group).tolist(), me


def test_a_group_of_some_ranks() -> None:
    found = on_ranks(4, within_a_group)
    assert found[1] == ([1.0, 2.0, 3.0], 0)
    assert found[3] == ([1.0, 2.0, 3.0], 1)
