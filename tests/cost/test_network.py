"""Network: seconds of a round of messages, as the clocks of `cost` count them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hetconv
from hetconv.cost.estimator import estimate
from hetconv.cost.network import Network
from hetconv.cost.timeline import Clocks, Pass
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import (
    Copying,
    Curve,
    DeviceModel,
    LinkModel,
    OperatorModel,
    SharedWire,
)
from hetconv.sharding.layout import Layout
from hetconv.sharding.moves import bytes_per_pair, exchanges
from hetconv.sharding.param_shards import all_reduce_among
from hetconv.sharding.split import Split
from tests.strategies import layouts, read_regions, shapes

DEVICE = DeviceModel("cpu", "cpu", 8e9, {"float32": 1e11}, 1e10)
rates = st.floats(0, 9, allow_subnormal=False)


@st.composite
def profiles(draw: st.DrawFn, world: int) -> ClusterProfile:
    """Of devices that are linked at random, some of which share memory."""
    links = {
        f"{a}-{b}": LinkModel(draw(rates), draw(rates))
        for b in range(world)
        for a in range(b)
    }
    some = st.one_of(st.none(), st.builds(Copying, *(st.floats(0.1, 9),) * 3))
    return ClusterProfile(
        tuple(replace(DEVICE, copying=draw(some)) for _ in range(world)), links
    )


def network(*shared: SharedWire) -> Network:
    """Of three ranks, with other numbers for each link."""
    links = {
        "0-1": LinkModel(1.0, 2.0),
        "0-2": LinkModel(10.0, 3.0),
        "1-2": LinkModel(100.0, 5.0),
    }
    return Network.of(ClusterProfile((DEVICE,) * 3, links, shared=shared))


@given(st.data(), shapes, st.integers(1, 5), st.sampled_from([2, 4, 8]))
def test_a_round_takes_what_clocks_that_start_together_say(
    data: st.DataObject, shape: tuple[int, ...], world: int, itemsize: int
) -> None:
    profile = data.draw(profiles(world))
    ends = st.one_of(layouts(shape, world), read_regions(shape, world))
    one = exchanges(data.draw(ends).boxes, data.draw(ends).boxes)[:1]
    sent = np.zeros((world, world))
    for pair, size in bytes_per_pair(one, itemsize).items():
        sent[pair] = size
    clocks, rounds = (
        Clocks(world),
        [Network.of(profile).messages(r, itemsize) for r in one],
    )
    assert all((r.sent_bytes == sent).all() for r in rounds)
    clocks.step(Pass("", False, np.zeros(world), rounds))
    arrivals, (_, wanted) = clocks.now, one[0] if one else ((), ())
    joined = np.array([box.numel * itemsize for box in wanted] or [0.0] * world)
    held_twice = [np.zeros(world)]
    for held, boxes in one:
        more = [
            sum(box.intersect(own).numel for box in held) - own.numel for own in boxes
        ]
        held_twice = [np.maximum(more, 0) * itemsize]
    assert Network.of(profile).spent(sent, *held_twice, joined) == pytest.approx(
        arrivals, rel=1e-12, abs=0
    )
    assert Network.of(profile).seconds(sent, *held_twice, joined) == pytest.approx(
        max(arrivals), rel=1e-12, abs=0
    )


def test_a_rank_sends_in_turn_and_receives_meanwhile() -> None:
    sent = np.array([[0, 7, 1], [4, 0, 0], [0, 0, 0]])
    out_of_0, into_0, into_1, into_2 = (
        (1 + 7 * 2) + (10 + 1 * 3),
        1 + 4 * 2,
        1 + 7 * 2,
        10 + 1 * 3,
    )
    assert network().spent(sent).tolist() == [
        max(out_of_0, into_0),
        max(into_1, into_0),
        into_2,
    ]
    assert network().seconds(sent) == out_of_0


def test_many_rounds_are_told_at_once() -> None:
    rng = np.random.default_rng(0)
    sent = rng.integers(0, 3, (4, 2, 3, 3))
    one = network(SharedWire("", ((0, 1), (2, 1)), 4.0))
    expected = [[one.seconds(sent[i, j]) for j in range(2)] for i in range(4)]
    assert one.seconds(sent) == pytest.approx(np.array(expected), rel=1e-12, abs=0)
    assert one.spent(sent).shape == (4, 2, 3)


def test_no_bytes_and_what_a_rank_keeps_cost_nothing() -> None:
    assert network().seconds(np.diag([5, 6, 7])) == 0


def test_a_shared_wire_carries_the_bytes_of_all_its_pairs_in_turn() -> None:
    sent = np.array([[0, 7, 1], [4, 0, 2], [0, 0, 0]])
    alone = network().seconds(sent)
    uplink, other = (
        SharedWire("", ((0, 2), (1, 2)), 1000.0),
        SharedWire("", ((2, 0), (2, 1)), 1e6),
    )
    assert network(uplink).seconds(sent) == (1 + 2) * 1000
    assert network(other, uplink).seconds(sent) == (1 + 2) * 1000
    assert network(replace(uplink, s_per_byte=1e-3)).seconds(sent) == alone
    assert network(other).seconds(sent) == alone


def everyone_to_everyone(
    profile: ClusterProfile, size: int, across: bool = False
) -> float:
    """Seconds in which each device sends ``size`` bytes to each other one, or to each
    in other nodes.
    """
    sent = size * (1 - np.eye(profile.world))
    for node in profile.nodes if across else ():
        sent[np.ix_(node, node)] = 0
    return float(Network.of(profile).seconds(sent))


def test_what_all_devices_send_to_another_node_goes_through_its_card() -> None:
    profile = ClusterProfile.from_devices(
        "4xV100-SXM2-32GB / 2xT4", link="nvlink2 / pcie3-x16", between="ethernet-100g"
    )
    assert everyone_to_everyone(profile, 10**9, across=True) == pytest.approx(
        4 * 2 * 1e9 / 12.5e9
    )
    three = ClusterProfile.from_devices("2xT4 / T4 / T4", between="ethernet-100g")
    assert everyone_to_everyone(three, 10**9, across=True) == pytest.approx(
        2 * 2 * 1e9 / 12.5e9
    )  # out of the first


def test_sums_of_gradients_take_their_holders_more_than_messages() -> None:
    net = network()
    slow = Network(net.latency_s, net.s_per_byte, sum_s_per_byte=7.0)
    assert slow.s_per_summed_byte((0, 1)) == net.s_per_summed_byte((0, 1)) + 7
    assert slow.s_per_summed_byte((1,)) == net.s_per_summed_byte((1,)) == 0
    sums = [
        (all_reduce_among((0, 2), 5, 3), 4),
        (all_reduce_among((0, 1, 2), 2, 3), 8),
        ((), 4),
    ]
    assert slow.summing(sums).tolist() == [7 * (20 + 16), 7 * 16, 7 * (20 + 16)]
    assert slow.summing([]).tolist() == net.summing(sums).tolist() == [0, 0, 0]


def test_who_gets_several_summands_adds_them() -> None:
    """Of 12 numbers each rank gets 4 from each other one, and adds them; of disjoint
    parts nothing is added.
    """
    like_relu = Curve((1.0, 2.0), (1.0, 2.0))  # a second for each byte read or written
    slow = replace(
        DEVICE, others={"elementwise float32": OperatorModel(like_relu, like_relu)}
    )
    silent = LinkModel(0.0, 0.0)
    net = Network.of(
        ClusterProfile(
            (DEVICE, slow, slow), dict.fromkeys(("0-1", "0-2", "1-2"), silent)
        )
    )
    assert net.adding == pytest.approx([0.0, 3.0, 3.0])
    partial, third, whole = (
        Layout.partial((12,), 3),
        Layout.sharded((12,), 0, (4, 4, 4)),
        Layout.replicated((12,), 3),
    )
    (scattered,), (gathered,) = (
        exchanges(partial.boxes, third.boxes),
        exchanges(third.boxes, whole.boxes),
    )
    assert net.messages(scattered, 4).together.tolist() == pytest.approx(
        [0, 3 * 2 * 16, 3 * 2 * 16]
    )
    assert net.messages(gathered, 4).together.tolist() == [0, 0, 0]


def test_a_step_counts_what_sums_take_beside_their_messages() -> None:
    graph = hetconv.capture(nn.Conv2d(2, 4, 3, bias=False), torch.zeros(2, 2, 5, 5))
    profile = ClusterProfile((DEVICE,) * 2, {"0-1": LinkModel(0.0, 0.0)})
    first, second = (
        estimate(
            graph,
            replace(profile, sum_s_per_byte=s),
            {"": Split("sample", (1, 1))},
            "train",
        )[0]
        for s in (0.0, 1.0)
    )
    added = 4 * 4 * 2 * 9  # bytes of the weight
    assert second.step_s == pytest.approx(first.step_s + added)
    assert second.compute_s == pytest.approx([busy + added for busy in first.compute_s])
    assert second.operator_sum_s == pytest.approx((first.operator_sum_s or 0) + added)


MEMORY = replace(DEVICE, copying=Copying(2.0, 3.0, 7.0))


def by_memory(
    *devices: DeviceModel, nodes: tuple[tuple[int, ...], ...] = ()
) -> Network:
    """Without latency; by wires a byte takes 100 seconds."""
    links = {
        f"{a}-{b}": LinkModel(0.0, 100.0) for b in range(len(devices)) for a in range(b)
    }
    return Network.of(ClusterProfile(devices, links, nodes=nodes))


def test_by_memory_each_rank_sends_and_then_joins_what_is_there() -> None:
    """The first has 1 byte of 4; half as fast, it would take as many times as long for
    its copies alone.
    """
    net = by_memory(MEMORY, replace(MEMORY, copying=Copying(4.0, 6.0, 14.0)))
    (gathered,) = exchanges(
        Layout.sharded((4,), 0, (1, 3)).boxes, Layout.replicated((4,), 2).boxes
    )
    found = net.messages(gathered, 1)
    assert found.sending.tolist() == [2, 12]
    assert found.receiving.tolist() == [12, 24]
    assert found.together.tolist() == [12 + 12, 12 + 24]
    assert net.messages(gathered, 1, separate=True).receiving.tolist() == [
        3 * 3,
        1 * 6,
    ]  # of what arrives alone


def test_who_comes_late_finds_its_messages_there() -> None:
    """The second computes for 20 seconds first: it takes no longer than its own copies
    then, the first waits.
    """
    net, clocks = by_memory(MEMORY, MEMORY), Clocks(2)
    (gathered,) = exchanges(
        Layout.sharded((4,), 0, (1, 3)).boxes, Layout.replicated((4,), 2).boxes
    )
    clocks.step(Pass("late", False, np.array([0.0, 20.0]), []))
    clocks.step(Pass("gathers", False, np.zeros(2), [net.messages(gathered, 1)]))
    assert clocks.now.tolist() == [20 + 6 + 12, 20 + 6 + 12]
    assert clocks.moving.tolist() == [2 + 12, 6 + 12]
    clocks = Clocks(2)
    clocks.step(Pass("late", False, np.array([20.0, 0.0]), []))
    clocks.step(Pass("gathers", False, np.zeros(2), [net.messages(gathered, 1)]))
    assert clocks.now.tolist() == [
        20 + 2 + 12,
        20 + 2 + 12,
    ]  # though three bytes came to the first, and one from it


def test_sums_by_memory_are_added_where_they_lie() -> None:
    partial, half = Layout.partial((4,), 2), Layout.sharded((4,), 0, (2, 2))
    (scattered,) = exchanges(partial.boxes, half.boxes)
    found = by_memory(MEMORY, MEMORY).messages(scattered, 1)
    assert (found.sending.tolist(), found.receiving.tolist()) == ([4, 4], [14, 14])


def test_between_hosts_wires_carry_messages() -> None:
    """0 and 1 share memory; 2 is elsewhere, and 3 is with it but was not measured.
    Copies are made first.
    """
    net = by_memory(MEMORY, MEMORY, MEMORY, DEVICE, nodes=((0, 1), (2, 3)))
    sent = np.zeros((4, 4))
    sent[0, 1] = sent[0, 2] = sent[2, 3] = 1.0
    assert net.spent(sent, 0.0, np.array([0.0, 1.0, 1.0, 1.0])).tolist() == [
        2 + 100,
        2 + 3,
        2 + 100,
        100,
    ]


def test_a_device_alone_copies_no_messages() -> None:
    profile = ClusterProfile((MEMORY,) * 2, {"0-1": LinkModel(1.0, 1.0)})
    assert [device.copying for device in profile.without_messages().devices] == [
        None,
        None,
    ]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_devices_that_meet_in_the_host_share_it_from_three_on(world: int) -> None:
    at_once = (
        (world - 1) * 1e9 / 31.5e9
    )  # a device, to all others through its own lanes
    switch = ClusterProfile.from_devices(f"{world}xA10", link="pcie4-x16-switch")
    host = ClusterProfile.from_devices(f"{world}xA10", link="pcie4-x16")
    assert everyone_to_everyone(switch, 10**9) == pytest.approx(at_once, rel=1e-2)
    assert everyone_to_everyone(host, 10**9) == pytest.approx(
        at_once * world / 2, rel=1e-2
    )


def test_messages_of_a_plan_share_wires_too() -> None:
    """A piece for each device of the other node: all are there when the card has
    carried them, other ranks sooner.
    """
    profile = ClusterProfile.from_devices("2xT4 / 2xT4 / T4", between="ethernet-100g")
    here = Layout.sharded((4 * 10**8,), 0, (2 * 10**8, 2 * 10**8, 0, 0, 0))
    there = Layout.sharded((4 * 10**8,), 0, (0, 0, 2 * 10**8, 2 * 10**8, 0))
    (one,) = exchanges(here.boxes, there.boxes)
    assert Network.of(profile).messages(one, 4).together == pytest.approx(
        [2 * 0.8e9 / 12.5e9] * 4 + [0]
    )
