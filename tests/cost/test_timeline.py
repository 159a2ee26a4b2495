"""A simulated step, event by event, and its Chrome trace."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hetconv
from hetconv.cost.estimator import StepEstimator
from hetconv.cost.network import Messages, Network, overlapped_s
from hetconv.cost.propagate import RUNNING_STATS_EXCHANGE
from hetconv.cost.timeline import Clocks, Pass, chrome_trace
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Mode, Prediction
from hetconv.schemas.timeline import Event
from hetconv.sharding.layout import Layout
from hetconv.sharding.moves import exchanges
from tests.nets import NETS, splits_of

CLUSTER = ClusterProfile.from_devices(["A100-SXM4-80GB", "V100-SXM2-32GB", "T4"])
MIXES: list[Any] = [
    ("height",),
    ("filter",),
    ("sample", "channel", "height"),
    ("width", "replicate", "filter"),
]


def simulated(
    net: str, kinds: Any, mode: Mode, overlap: float = 1.0
) -> tuple[Prediction, list[Event]]:
    make, shape = NETS[net]
    model: nn.Module = make().train(mode == "train")
    with torch.set_grad_enabled(mode == "train"):
        graph = hetconv.capture(model, torch.zeros(shape))
    events: list[Event] = []
    cluster = replace(CLUSTER, overlap=overlap)
    prediction, _ = StepEstimator(graph, cluster, mode).estimate(
        splits_of(model, kinds, (4, 2, 1)), events.append
    )
    return prediction, events


def seconds(events: list[Event]) -> float:
    return sum(e.end_s - e.start_s for e in events)


CASES = pytest.mark.parametrize(
    ("net", "kinds", "mode"),
    [
        (net, kinds, mode)
        for net in NETS
        for kinds in MIXES
        for mode in ("train", "infer")
    ],
)


@CASES
def test_events_are_what_is_predicted(net: str, kinds: Any, mode: Mode) -> None:
    p, events = simulated(net, kinds, mode, overlap=0.7)
    assert max(e.end_s for e in events) == p.step_s
    assert {e.backward for e in events} == (
        {False, True} if mode == "train" else {False}
    )
    for device, (busy, moving) in enumerate(
        zip(p.compute_s, p.communication_s, strict=True)
    ):
        own = [e for e in events if e.device == device]
        computing = [e for e in own if e.thread == "compute" and not e.waits]
        assert seconds(computing) == pytest.approx(busy, rel=1e-9)
        transfers = [e for e in own if e.thread == "transfer" and not e.waits]
        hidden = sum(
            max(min(t.end_s, c.end_s) - max(t.start_s, c.start_s), 0)
            for t in transfers
            for c in computing
        )
        assert seconds(transfers) - hidden == pytest.approx(moving, rel=1e-9)
        assert busy + moving <= p.step_s * (1 + 1e-9)
        for thread in ("compute", "transfer"):
            spans = sorted((e.start_s, e.end_s) for e in own if e.thread == thread)
            assert all(before[1] <= after[0] for before, after in pairwise(spans))


@pytest.mark.parametrize("overlap", [1.0, 0.7])
@CASES
def test_a_step_takes_no_longer_than_its_operators_one_by_one(
    net: str, kinds: Any, mode: Mode, overlap: float
) -> None:
    """But for the sums of gradients, whose latency the sum leaves out, and running statistics."""
    p, events = simulated(net, kinds, mode, overlap)
    before = max(e.end_s for e in events if e.name != "sums of gradients")
    exchanges = [e for e in events if e.name == RUNNING_STATS_EXCHANGE]
    exchange_s = max((e.end_s for e in exchanges), default=0.0) - min(
        (e.start_s for e in exchanges if not e.waits), default=0.0
    )
    assert before - exchange_s <= p.operator_sum_s * (1 + 1e-9)


def eight_bytes() -> tuple[list[Messages], list[Messages]]:
    """Eight bytes from 0 to 1, and back, a byte a second."""
    network = Network(np.zeros((2, 2)), np.ones((2, 2)) - np.eye(2))
    left, halves = (Layout.sharded((4,), 0, sizes).boxes for sizes in ((4, 0), (2, 2)))
    both = exchanges(left, halves), exchanges(halves, left)
    there, back = ([network.messages(one, 4) for one in rounds] for rounds in both)
    return there, back


@pytest.mark.parametrize(
    ("overlap", "done", "moving"),
    [(1.0, [8, 10], [5, 0]), (0.5, [9.5, 14], [6.5, 2.5]), (0.0, [11, 18], [8, 5])],
)
def test_of_halos_and_computing_a_part_of_the_shorter_one_is_hidden(
    overlap: float, done: list[float], moving: list[float]
) -> None:
    """8 seconds of messages beside 3 and 10 of computing."""
    clocks, (there, _) = Clocks(2, overlap=overlap), eight_bytes()
    clocks.step(Pass("", False, np.array([3.0, 10.0]), there, overlaps_halos=True))
    assert clocks.now.tolist() == done
    assert clocks.moving.tolist() == moving
    assert max(done) == overlapped_s(10, 8, overlap)


def test_halos_travel_while_devices_compute_and_late_senders_are_waited_for() -> None:
    """A byte a second: 8 go from 0 to 1 while they compute for 3 and 10 seconds; 8 come
    back before a second each.
    """
    events: list[Event] = []
    clocks, there, back = Clocks(2, events.append), *eight_bytes()
    clocks.step(Pass("first", False, np.array([3.0, 10.0]), there, overlaps_halos=True))
    clocks.step(Pass("second", True, np.ones(2), back))
    spans = [(e.device, e.thread, e.name, e.waits, e.start_s, e.end_s) for e in events]
    assert sorted(spans) == [
        (0, "compute", "first", False, 0, 3),
        (0, "compute", "first", True, 3, 8),
        (0, "compute", "second", False, 18, 19),
        (0, "transfer", "first", False, 0, 8),
        (0, "transfer", "second", False, 10, 18),
        (0, "transfer", "second", True, 8, 10),
        (1, "compute", "first", False, 0, 10),
        (1, "compute", "second", False, 18, 19),
        (1, "transfer", "first", False, 0, 8),
        (1, "transfer", "second", False, 10, 18),
    ]
    assert [e.backward for e in events] == [e.name == "second" for e in events]
    assert clocks.busy.tolist() == [4, 11]
    assert clocks.moving.tolist() == [5 + 8, 8]


def test_a_trace_has_a_process_per_device_and_every_event() -> None:
    prediction, events = simulated("resnet", ("height",), "train")
    found = json.loads(json.dumps(chrome_trace(("a", "b", "b"), events)))["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in found
        if e["name"] == "thread_name"
    }
    assert list(named.values()) == ["0: a", "1: b", "2: b"]
    assert list(threads.values()) == ["compute", "transfer"] * 3
    assert len({tid for _, tid in threads}) == 6
    assert 0 not in named

    spans = [e for e in found if e["ph"] == "X"]
    assert len(spans) == len(events)
    assert {e["ph"] for e in found} == {"M", "X"}
    for span, event in zip(spans, events, strict=True):
        assert named[span["pid"]].startswith(f"{event.device}:")
        assert threads[span["pid"], span["tid"]] == event.thread
        assert span["args"]["operator"] == event.name
        assert span["cat"].split(",")[0] == (
            "backward" if event.backward else "forward"
        )
        assert span["ts"] == pytest.approx(event.start_s * 1e6, abs=1e-3)
        assert span["ts"] + span["dur"] == pytest.approx(event.end_s * 1e6, abs=1e-3)
        assert (span["name"] == "wait") is span["cat"].endswith("wait") is event.waits
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(
        prediction.step_s * 1e6, abs=1e-3
    )

    by_thread = defaultdict(list)
    for e in spans:
        by_thread[e["tid"]].append(
            (round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3))
        )
    assert all(
        a[1] <= b[0] for spans in by_thread.values() for a, b in pairwise(sorted(spans))
    )
