"""Parameter shards, overlapping ones among them, in gradients, states and norms."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hetconv
from hetconv.comm.rank_group import rank_group_of
from hetconv.nn.layers import HetConv2d
from hetconv.nn.parameters import split_layers
from hetconv.runtime import gradient_sync
from hetconv.runtime.gradient_sync import GradientSync
from hetconv.sharding.layout import Box, Shape
from hetconv.sharding.moves import buckets, bytes_per_pair
from hetconv.sharding.param_shards import ParamShards, all_reduce_among
from hetconv.sharding.split import Split
from tests.equivalence import (
    Differences,
    apart,
    assert_same,
    full_gradients,
    same_state,
)
from tests.spawn import on_ranks
from tests.strategies import shapes, sizes, worlds

from .test_layout import mask, performed


@st.composite
def param_shards(draw: st.DrawFn, shape: Shape, world: int) -> ParamShards:
    """Draws a slice per rank; those of some ranks cover the parameter."""
    dim = draw(st.integers(0, len(shape) - 1))
    some = draw(st.integers(1, world))
    cover = ParamShards.sharded(shape, dim, draw(sizes(shape[dim], some))).boxes
    ends = (
        sorted(draw(st.tuples(*[st.integers(0, shape[dim])] * 2)))
        for _ in range(world - some)
    )
    rest = (Box.whole(shape).with_range(dim, lo, hi) for lo, hi in ends)
    return ParamShards(shape, tuple(draw(st.permutations([*cover, *rest]))))


@given(st.data(), shapes, worlds)
def test_cells_cover_a_parameter_once_and_have_all_holders(
    data: st.DataObject, shape: Shape, world: int
) -> None:
    of = data.draw(param_shards(shape, world))
    assert (sum(mask(box, shape) for box, _ in of.cells) == 1).all()
    for rank, own in enumerate(of.boxes):
        mine = sum(
            (mask(box, shape) for box, holders in of.cells if rank in holders),
            np.zeros(shape, dtype=int),
        )
        assert (mine == mask(own, shape)).all()
    assert all(a.holders != b.holders for a, b in pairwise(of.cells))
    assert of.has_overlap == bool((sum(mask(box, shape) for box in of.boxes) > 1).any())
    assert of.is_replicated == all((mask(box, shape) == 1).all() for box in of.boxes)


@given(st.data(), shapes, worlds)
def test_the_primary_layout_has_each_element_once(
    data: st.DataObject, shape: Shape, world: int
) -> None:
    of = data.draw(param_shards(shape, world))
    assert (sum(mask(box, shape) for box in of.primary.boxes) == 1).all()
    for own, box in zip(of.primary.boxes, of.boxes, strict=True):
        assert (mask(own, shape) <= mask(box, shape)).all()
        assert len(own.shape) == len(shape)


def test_the_primary_layout_prefers_low_ranks() -> None:
    of_nodes = ParamShards(
        (256,),
        tuple(Box((a,), (b,)) for a, b in ((0, 96), (96, 256), (0, 128), (128, 256))),
    )
    assert of_nodes.cell_holders == ((0, 2), (1, 2), (1, 3))
    assert of_nodes.primary.sizes == (96, 160, 0, 0)
    assert ParamShards.on_ranks((4, 2), (0, 3, 1)).primary.sizes == (0, 4, 0)
    assert ParamShards.sharded((4, 2), 1, (0, 2, 0)).primary.sizes == (0, 2, 0)


@given(st.integers(0, 40), st.sets(st.integers(0, 4), min_size=1))
def test_an_all_reduce_among_some_ranks_leaves_the_others_alone(
    numel: int, ranks: set[int]
) -> None:
    holders = tuple(sorted(ranks))
    local = [
        np.arange(numel) * (rank + 1) if rank in ranks else np.zeros(0, dtype=int)
        for rank in range(5)
    ]
    rounds = all_reduce_among(holders, numel, 5)
    for rank, total in enumerate(performed(rounds, local)):
        expected = np.arange(numel) * sum(r + 1 for r in holders)
        assert (total == (expected if rank in ranks else local[rank])).all()
    sent = bytes_per_pair(rounds, 1)
    assert {rank for pair_ in sent for rank in pair_} <= ranks
    assert sum(sent.values()) == 2 * (len(holders) - 1) * numel


OVERLAPS = {  # of four ranks
    "of nodes": ParamShards(
        (8, 3), tuple(Box((a, 0), (b, 3)) for a, b in ((0, 3), (3, 8), (0, 5), (5, 8)))
    ),
    "of nodes again": ParamShards(
        (8,), tuple(Box((a,), (b,)) for a, b in ((0, 3), (3, 8), (0, 5), (5, 8)))
    ),
    "along the second": ParamShards(
        (2, 6), tuple(Box((0, a), (2, b)) for a, b in ((0, 0), (1, 6), (0, 4), (4, 4)))
    ),
    "on two": ParamShards.on_ranks((4, 2), (0, 1, 0, 1)),
    "on three": ParamShards.on_ranks((5,), (1, 1, 0, 1)),
    "whole": ParamShards.on_ranks((3, 2), (1, 1, 1, 1)),
    "partly alone": ParamShards(
        (6,), tuple(Box((a,), (b,)) for a, b in ((0, 4), (3, 6), (0, 0), (6, 6)))
    ),
}


def contribution(shape: Shape, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def summed_in_buckets(limit: int) -> tuple[Differences, list[int]]:
    """Returns gradients of parameters that are used twice, and the bytes sent."""
    group, gradient_sync.buckets = rank_group_of(), partial(buckets, limit=limit)
    try:
        own = {name: of.boxes[group.rank] for name, of in OVERLAPS.items()}
        params = {
            name: torch.zeros(box.shape, dtype=torch.float64, requires_grad=True)
            for name, box in own.items()
        }
        of_id = {
            id(params[name]): of
            for name, of in OVERLAPS.items()
            if not of.is_replicated
        }
        scope = GradientSync(group, params.values(), of_id)
        with hetconv.count_sent() as sent:
            loss = torch.zeros((), dtype=torch.float64)
            for use in range(2):
                for seed, (name, of) in enumerate(OVERLAPS.items()):
                    mine = contribution(of.shape, group.rank, seed)[
                        own[name].slices_in(Box.whole(of.shape))
                    ]
                    loss = loss + (scope.alias(params[name]) * mine).sum() * (use + 1)
            loss.backward()
    finally:
        gradient_sync.buckets = buckets
    found: Differences = {}
    for seed, (name, of) in enumerate(OVERLAPS.items()):
        total = torch.zeros(of.shape, dtype=torch.float64)
        for rank, box in enumerate(of.boxes):
            at = box.slices_in(Box.whole(of.shape))
            total[at] += 3 * contribution(of.shape, rank, seed)[at]
        found[name] = apart(
            params[name].grad, total[own[name].slices_in(Box.whole(of.shape))]
        )
    return found, [sent[rank] for rank in range(group.size)]


@pytest.mark.parametrize("limit", [1, 10**6])
def test_gradients_are_summed_among_those_that_hold_the_same_elements(
    limit: int,
) -> None:
    results = on_ranks(4, summed_in_buckets, limit)
    assert_same([found for found, _ in results])
    if limit > 1:
        return
    expected = np.zeros((4, 4), dtype=int)  # a bucket for each parameter
    for of in OVERLAPS.values():
        for box, holders in of.cells:
            for pair_, size in bytes_per_pair(
                all_reduce_among(holders, box.numel, 4), 8
            ).items():
                expected[pair_] += size
    assert [sent for _, sent in results] == expected.tolist()


def overlapping() -> tuple[nn.Sequential, nn.Module]:
    """Returns a plain convolution and one of which ranks hold overlapping slices."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3))
    model = copy.deepcopy(plain)
    layer = HetConv2d.from_conv(model[0], Split("replicate"))
    bias = OVERLAPS["of nodes again"]
    weight = ParamShards(
        (8, 3, 3, 3),
        tuple(Box((*box.lo, 0, 0, 0), (*box.hi, 3, 3, 3)) for box in bias.boxes),
    )
    layer._allocate({"weight": weight, "bias": bias}, True, {})
    layer.load_full(dict(plain[0].named_parameters()))
    model[0] = layer  # type: ignore[assignment]
    return plain, model


def own_parts(model: nn.Module, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns this rank's shards of whole tensors, by parameter name."""
    (layer,) = split_layers(model)
    rank = dist.get_rank()
    return {
        f"0.{k}": whole[f"0.{k}"][of.boxes[rank].slices_in(Box.whole(of.shape))]
        for k, of in layer.held.items()
    }


def overlaps_in_states(path: Path) -> Differences:
    """Compares states, checkpoints, optimizers, clipping and replica divergence."""
    plain, model = overlapping()
    found = {f"state {k}": v for k, v in same_state(plain, model).items()}
    updates = [torch.optim.Adam(m.parameters(), 0.1) for m in (plain, model)]
    whole = {name: torch.randn_like(p) for name, p in plain.named_parameters()}
    for name, p in plain.named_parameters():
        p.grad = whole[name].clone()
    for name, p in model.named_parameters():
        p.grad = own_parts(model, whole)[name].clone()
    expected, norm = (
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5),
        hetconv.clip_grad_norm_(model, 0.5),
    )
    found["norm"] = apart(norm, expected)
    found |= {
        f"clipped {k}": apart(v, plain.get_parameter(k).grad)
        for k, v in full_gradients(model).items()
    }
    for update in updates:
        update.step()
    found |= {f"stepped {k}": v for k, v in same_state(plain, model).items()}
    hetconv.save_checkpoint(path, model, updates[1])
    _, other = overlapping()
    again = torch.optim.Adam(other.parameters())
    hetconv.load_checkpoint(path, other, again)
    pairs = zip(other.named_parameters(), model.parameters(), strict=True)
    found |= {f"loaded {k}": apart(a, b) for (k, a), b in pairs}
    kept = hetconv.full_optim_state_dict(other, again)["state"]
    for name, p in plain.named_parameters():
        found[f"moment {name}"] = apart(
            kept[name]["exp_avg_sq"], updates[0].state[p]["exp_avg_sq"]
        )
    hetconv.load_full_state_dict(other, whole)
    found |= {
        f"taken {k}": apart(p.detach(), own_parts(other, whole)[k])
        for k, p in other.named_parameters()
    }
    if dist.get_rank() == 2:
        with torch.no_grad():
            other[0].weight[4] += 0.25
    found["drift"] = abs(hetconv.sync_replicated(other) - 0.25)
    found |= {
        f"synced {k}": apart(p.detach(), own_parts(other, whole)[k])
        for k, p in other.named_parameters()
    }
    return found | {"no drift": hetconv.sync_replicated(other)}


def test_overlapping_slices_make_one_state(tmp_path: Path) -> None:
    assert_same(on_ranks(4, overlaps_in_states, tmp_path / "run"))
