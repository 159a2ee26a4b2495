"""Tables of data movement say of every pair what the pair's own `Move` says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetconv.cost import redistribution
from hetconv.cost.network import Network
from hetconv.cost.redistribution import MovedValue, movement_tables, received_bytes
from hetconv.errors import LayoutError
from hetconv.sharding.layer_rules import window_reads
from hetconv.sharding.layout import Box, Layout, ReadRegion, Shape, apportion
from hetconv.sharding.moves import Exchange, Move, bytes_per_pair
from tests.cost.test_network import rates
from tests.strategies import boxes, layouts, read_regions, weights, windows

extents = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def halos(draw: st.DrawFn, shape: Shape, world: int) -> ReadRegion:
    """What a sliding window reads to compute slices of its output."""
    dim, window = draw(st.integers(0, len(shape) - 1)), draw(windows)
    out = tuple(window.out_size(n) if d == dim else n for d, n in enumerate(shape))
    return window_reads(
        draw(layouts(shape, world)),
        Layout.sharded(out, dim, apportion(out[dim], draw(weights(world)))),
        dim,
        window,
    )


@st.composite
def grouped(draw: st.DrawFn, shape: Shape, world: int) -> ReadRegion:
    """Groups of ranks that read the same, all of one group among them."""
    few = draw(
        st.lists(
            st.one_of(boxes(shape), st.just(Box.whole(shape))), min_size=1, max_size=2
        )
    )
    return ReadRegion(shape, tuple(draw(st.sampled_from(few)) for _ in range(world)))


def sources(shape: Shape, world: int) -> st.SearchStrategy[Layout]:
    whole = st.sampled_from(
        [Layout.replicated(shape, world), Layout.partial(shape, world)]
    )
    return layouts(shape, world) if shape else whole


def reads(shape: Shape, world: int) -> st.SearchStrategy[Layout | ReadRegion]:
    kinds = [sources(shape, world), read_regions(shape, world), grouped(shape, world)]
    return st.one_of(
        *kinds,
        st.just(ReadRegion.everything(shape, world)),
        *([halos(shape, world)] if shape else []),
    )


@st.composite
def networks(draw: st.DrawFn, world: int) -> Network:
    """With other numbers for the way back, so that sender and receiver cannot be
    confused, and with shared wires.
    """
    both = st.lists(rates, min_size=2 * world**2, max_size=2 * world**2)
    latency_s, s_per_byte = np.reshape(draw(both), (2, world, world)) * (
        1 - np.eye(world)
    )
    ranks = st.integers(0, world - 1)
    pairs = st.lists(
        st.tuples(ranks, ranks).filter(lambda pair: pair[0] != pair[1]), unique=True
    ).map(tuple)
    wires = draw(st.lists(st.tuples(pairs, rates), max_size=2)) if world > 1 else []
    adding, sends, joins = (
        np.array(draw(st.lists(rates, min_size=world, max_size=world)))
        for _ in range(3)
    )
    copies = np.array(draw(st.lists(st.booleans(), min_size=world, max_size=world)))
    by_memory = np.outer(copies, copies)
    return Network(
        latency_s,
        s_per_byte,
        tuple(wires),
        adding=adding,
        by_memory=by_memory,
        sends=sends,
        joins=joins,
    )


def seconds(
    network: Network, rounds: tuple[Exchange, ...], itemsize: int, apart: bool = False
) -> float:
    """Every round, message by message, and what several have of it added to what the
    first of them has.

    By memory a rank sends all of its messages before anything else, and joins what it
    wants in the end.
    """
    total, by_memory = 0.0, np.asarray(network.by_memory)
    sends, joins = np.asarray(network.sends), np.asarray(network.joins)
    for one in rounds:
        held, wanted = one
        more = [
            sum(box.intersect(own).numel for box in held) - own.numel for own in wanted
        ]
        adds = [
            max(n, 0) * itemsize * float(s)
            for n, s in zip(more, network.adding, strict=True)
        ]
        out, into, first, last = ([0.0] * network.world for _ in range(4))
        sent, got = bytes_per_pair((one,), itemsize), set[int]()
        for (s, r), size in sent.items():
            if by_memory[s, r]:
                first[s] += network.latency_s[s, r] / 2 + size * sends[s]
                last[r] += network.latency_s[s, r] / 2
                got.add(r)
            else:
                message = network.latency_s[s, r] + size * network.s_per_byte[s, r]
                out[s] += message
                into[r] += message
        for r in got:
            came = sum(size for (_, to), size in sent.items() if to == r)
            last[r] += (
                (came if apart else wanted[r].numel * itemsize)
                * joins[r]
                * (adds[r] <= 0)
            )
        there = [
            max([first[r], *(first[s] for s, to in sent if to == r)])
            for r in range(network.world)
        ]
        wires = [
            sum(sent.get(pair, 0) for pair in pairs) * s_per_byte
            for pairs, s_per_byte in network.shared
        ]
        ranks = zip(there, out, into, last, adds, strict=True)
        total += max(
            [
                *(
                    before + max(a, b) + after + add
                    for before, a, b, after, add in ranks
                ),
                *wires,
            ]
        )
    return total


@given(
    st.data(),
    extents,
    st.integers(1, 5),
    st.sampled_from([2, 4, 8]),
    st.booleans(),
    st.sampled_from([1, 30, 10**4]),
)
def test_every_entry_is_that_of_its_move(
    data: st.DataObject,
    shape: Shape,
    world: int,
    itemsize: int,
    adjoint: bool,
    block: int,
) -> None:
    S = data.draw(st.lists(sources(shape, world), max_size=6))
    R = data.draw(st.lists(reads(shape, world), max_size=6))
    network = data.draw(networks(world))
    rounds = [
        [Move(s, r).adjoint if adjoint else Move(s, r).forward for r in R] for s in S
    ]
    apart = np.array(
        [[data.draw(st.booleans()) for _ in R] for _ in S], dtype=bool
    ).reshape(len(S), len(R))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redistribution, "MAX_BLOCK_ELEMENTS", block)
        (took,) = movement_tables([MovedValue(S, R, itemsize, adjoint, apart)], network)
        sent = (
            received_bytes(MovedValue(S, R, itemsize, adjoint)).sum(-1) if S else took
        )
    assert took.shape == sent.shape == (len(S), len(R))
    for i, row in enumerate(rounds):
        for j, one in enumerate(row):
            assert took[i, j] == pytest.approx(
                seconds(network, one, itemsize, bool(apart[i, j])), rel=1e-12, abs=0
            )
            assert sent[i, j] == sum(bytes_per_pair(one, itemsize).values())


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("shape", [(64, 256, 56, 56), (2**33 + 1,)])
def test_large_values_are_counted_exactly(shape: Shape, adjoint: bool) -> None:
    world = 3
    rng = np.random.default_rng(0)
    cuts = [
        Layout.sharded(
            shape, d, apportion(n, tuple(rng.integers(0, 9, world).tolist()))
        )
        for d, n in enumerate(shape)
    ]
    S = [Layout.replicated(shape, world), Layout.partial(shape, world), *cuts, *cuts]
    R = [
        *S,
        ReadRegion.everything(shape, world),
        *(ReadRegion(shape, cut.boxes[::-1]) for cut in cuts),
    ]
    found = received_bytes(MovedValue(S, R, 8, adjoint)).sum(-1)
    for i, s in enumerate(S):
        for j, r in enumerate(R):
            assert found[i, j] == sum(
                bytes_per_pair(
                    Move(s, r).adjoint if adjoint else Move(s, r).forward, 8
                ).values()
            )


def test_shared_wires_count_in_each_round() -> None:
    """A sum of wholes on three ranks of 4 bytes each: 2 * 3 messages of 4 bytes, in two rounds."""
    everyone = tuple((s, r) for s in range(3) for r in range(3) if s != r)
    network = Network(np.zeros((3, 3)), np.zeros((3, 3)), ((everyone, 1.0),))
    partial, whole = Layout.partial((3,), 3), Layout.replicated((3,), 3)
    assert movement_tables([MovedValue([partial], [whole], 4, False)], network)[0] == [
        [2 * 6 * 4]
    ]


def test_what_is_not_of_one_value_is_refused() -> None:
    network = Network(np.zeros((2, 2)), np.zeros((2, 2)))
    two = Layout.partial((4,), 2)
    with pytest.raises(
        LayoutError, match=r"for \[1\] ranks were given for a network of 2"
    ):
        movement_tables(
            [MovedValue([two], [Layout.partial((4,), 1)], 4, False)], network
        )
    with pytest.raises(LayoutError, match=r"shapes \[\(4,\), \(5,\)\]"):
        movement_tables(
            [MovedValue([two], [Layout.partial((5,), 2)], 4, False)], network
        )
    with pytest.raises(LayoutError, match=r"for \[2, 3\] ranks"):
        received_bytes(MovedValue([two], [Layout.partial((4,), 3)], 4, False))
