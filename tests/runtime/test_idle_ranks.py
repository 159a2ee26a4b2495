"""Ranks without a share of a layer hold nothing of it, and take no part in the sums of
its gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetconv
from hetconv.comm.rank_group import RankGroup, rank_group_of
from hetconv.comm.redistribute import PendingSum
from hetconv.cost import propagate as walking
from hetconv.cost.memory import parameter_bytes
from hetconv.nn.layers import HetLinear
from hetconv.runtime import gradient_sync
from hetconv.sharding.layout import Shape
from hetconv.sharding.moves import buckets
from hetconv.sharding.split import Split, SplitKind
from tests.equivalence import (
    Differences,
    assert_same,
    loss_of,
    one_step,
    pair,
    same_state,
    train,
)
from tests.nets import IMAGE_KINDS, NETS, ResNet, splits_of
from tests.spawn import on_ranks

ZEROS = ((1, 0), (0, 2, 1), (2, 1, 0, 0))


def sums_run_and_planned(
    limit: int,
) -> tuple[list[tuple[Any, int]], list[tuple[Any, int]]]:
    """(rounds, bytes per element) of every sum of gradients in a step, as it ran and as
    the plan has it.
    """
    make, shape = NETS["resnet"]
    splits = splits_of(make(), ("height", "filter", "sample"), (2, 1, 0))
    graph = hetconv.capture(make().double(), torch.randn(shape, dtype=torch.float64))
    _, cut = pair(make, splits, 3)
    ran: list[Any] = []

    class Noting(PendingSum):
        def __init__(self, group: RankGroup, local: Tensor, rounds: Any):
            super().__init__(group, local, rounds)
            ran.append((rounds, local.element_size()))

    with pytest.MonkeyPatch.context() as patch:
        for room in (gradient_sync, walking):
            patch.setattr(room, "buckets", partial(buckets, limit=limit))
        patch.setattr(gradient_sync, "PendingSum", Noting)
        loss_of(cut(torch.randn(shape))).backward()
        _, planned = walking.propagate(graph, splits, 3, "train")
    return ran, list(planned)


@pytest.mark.parametrize("limit", [1, 10**6])
def test_the_planned_sums_are_those_that_run(limit: int) -> None:
    for ran, planned in on_ranks(3, sums_run_and_planned, limit):
        assert (
            len({tuple(box.numel > 0 for box in rounds[0][0]) for rounds, _ in ran})
            == 2
        )
        assert (
            ran == planned
            if limit > 1
            else sorted(map(str, ran)) == sorted(map(str, planned))
        )


def trained(net: str, ratio: tuple[int, ...], optimizer: str) -> Differences:
    make, shape = NETS[net]
    return train(
        make,
        splits_of(make(), ("height", "sample", "width"), ratio),
        shape,
        len(ratio),
        optimizer,
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("ratio", ZEROS)
@pytest.mark.parametrize("net", ["resnet", "unet"])
def test_training_where_devices_hold_nothing(
    net: str, ratio: tuple[int, ...], optimizer: str
) -> None:
    assert_same(on_ranks(len(ratio), trained, net, ratio, optimizer))


def held_and_predicted(
    kind: SplitKind, ratio: tuple[int, ...]
) -> tuple[list[int], list[list[float]], list[int]]:
    """Bytes of each layer's parameters on this rank, what is predicted for all ranks,
    and shares of this rank.
    """
    make, shape = NETS["resnet"]
    splits = splits_of(make(), (kind,), ratio)
    _, cut = pair(make, splits, len(ratio))
    graph = hetconv.capture(make(), torch.randn(shape))
    own, predicted, shares = [], [], []
    for name in graph.layers:
        layer: Any = cut.get_submodule(name)
        own.append(sum(p.nbytes for p in layer.parameters()))
        predicted.append(parameter_bytes(graph, splits, len(ratio), name))
        sizes_of = splits[name].sizes or (1,) * len(ratio)
        shares.append(sizes_of[dist.get_rank()])
    return own, predicted, shares


@pytest.mark.parametrize("ratio", ZEROS)
@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_a_rank_holds_what_is_predicted_and_without_a_share_nothing(
    kind: SplitKind, ratio: tuple[int, ...]
) -> None:
    for rank, (own, predicted, shares) in enumerate(
        on_ranks(len(ratio), held_and_predicted, kind, ratio)
    ):
        assert own == pytest.approx([of_ranks[rank] for of_ranks in predicted])
        for size, share in zip(own, shares, strict=True):
            assert (size > 0) == (
                share > 0
            ) or kind == "channel"  # whose bias is whole on every rank


def drifted() -> tuple[list[float], int, Differences]:
    """What sync found where one of two holders is off; bytes sent where none is; what is left."""
    serial, cut = pair(ResNet, splits_of(ResNet(), ("sample",), (0, 2, 1)), 3)
    stem: Any = cut.get_submodule("stem")
    if dist.get_rank() == 2:
        with torch.no_grad():
            stem.weight[3, 1] -= 0.5
    first = hetconv.sync_replicated(cut)
    with hetconv.count_sent() as sent:
        second = hetconv.sync_replicated(cut)
    return [first, second], sent.total(), same_state(serial, cut)


def test_what_some_ranks_hold_is_brought_to_the_first_ones() -> None:
    results = on_ranks(3, drifted)
    assert [drifts for drifts, _, _ in results] == [[0.5, 0.0]] * 3
    checksums = 8 * sum(t.numel() > 0 for t in ResNet().state_dict().values())
    assert [sent for _, sent, _ in results] == [2 * checksums] * 3
    assert_same([found for _, _, found in results])


def linear_by_rows(shape: Shape) -> Differences | str:
    torch.set_default_dtype(torch.float64)
    plain = nn.Linear(4, 5)
    try:
        cut = HetLinear(
            plain, Split("height", (2, 0, 1)), rank_group_of(), "replicated"
        )
        return one_step(plain, cut, torch.randn(shape))
    except hetconv.HetConvError as e:
        return f"{type(e).__name__}: {e}"


def test_a_linear_without_what_is_cut_is_refused_on_every_rank() -> None:
    """All would compute the whole, and one has no weight."""
    assert_same(on_ranks(3, linear_by_rows, (2, 3, 4, 4)))
    for said in on_ranks(3, linear_by_rows, (2, 4)):
        assert said.startswith("SplitError")
        assert "no height to split; use sample" in said


def sent_for_one_device() -> tuple[int, bool]:
    """Bytes that go from this rank in a step in which one device computes all; whether
    it has every gradient.
    """
    layers = {name: Split("sample", (0, 2, 0)) for name in "01"}
    _, cut = pair(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(6, 5)), layers, 3)
    with hetconv.count_sent() as sent:
        loss_of(cut(torch.randn(2, 3, 8, 8))).backward()
    return sent.total(), all(
        p.grad is not None and p.grad.shape == p.shape for p in cut.parameters()
    )


def test_a_device_by_itself_sends_its_result_and_sums_nothing() -> None:
    result = 8 * 2 * 4 * 6 * 5
    assert on_ranks(3, sent_for_one_device) == [
        (0, True),
        (2 * result, True),
        (0, True),
    ]
