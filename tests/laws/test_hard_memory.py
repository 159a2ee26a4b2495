"""Strides, expanded gradients, unequal statistics and rounding: memory as few models have it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetconv
from hetconv.nn.layers import HetConv2d
from hetconv.nn.state_dict import shares
from hetconv.sharding.split import Split
from tests.equivalence import (
    Differences,
    apart,
    assert_same,
    full_gradients,
    one_step,
    pair,
    same_state,
)
from tests.nets import ResNet, plan_of, splits_of
from tests.spawn import on_ranks


def strided(seed: int) -> nn.Module:
    """Parameters and a buffer that do not lie in memory in the order of their dimensions."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(6, 5)).to(
        memory_format=torch.channels_last
    )
    model[2].weight = nn.Parameter(torch.randn(6, 5).t())
    model.register_buffer("strided", torch.randn(4, 6)[:, ::2])
    return model


def of_rank_0() -> dict[str, Tensor]:
    model = strided(dist.get_rank())
    return hetconv.parallelize(
        model, plan_of(model, {"0": Split("height", (2, 1, 1))}, 3)
    ).state_dict()


def test_tensors_of_any_strides_are_rank_0_s_on_every_rank() -> None:
    """On gloo a broadcast into a strided slot is silently wrong."""
    expected = strided(0).state_dict()
    for found in on_ranks(3, of_rank_0):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def with_expanded_gradient(kind: str) -> Differences:
    """sum() sends an expanded gradient, one number for all elements; the transpose a
    strided one.
    """
    torch.set_default_dtype(torch.float64)
    plain = nn.Conv2d(4, 4, 3, padding=1)
    cut = HetConv2d.from_conv(plain, Split(kind, (3, 1)), output="split")  # type: ignore[arg-type]
    x = torch.randn(2, 8, 7, 4).permute(0, 3, 1, 2)
    x_cut, x_plain = x.detach().requires_grad_(), x.detach().clone().requires_grad_()
    (
        cut(x_cut).sum()
        + hetconv.gather(cut(x_cut)).transpose(2, 3).contiguous().square().sum()
    ).backward()
    (plain(x_plain).sum() + plain(x_plain).square().sum()).backward()
    gradients = full_gradients(cut)
    same = {
        name: apart(gradients[name], p.grad) for name, p in plain.named_parameters()
    }
    return same | {"x": apart(x_cut.grad, x_plain.grad)}


@pytest.mark.parametrize("kind", ["sample", "height", "width", "filter", "channel"])
def test_gradients_and_inputs_that_are_not_contiguous(kind: str) -> None:
    assert_same(on_ranks(2, with_expanded_gradient, kind))


def parameters_after_training(kind: Any) -> list[Tensor]:
    """What every rank holds alike, from ranks that began with different weights."""
    torch.manual_seed(dist.get_rank())
    model = ResNet()
    cut = hetconv.parallelize(
        model, plan_of(model, splits_of(model, (kind,), (5, 2, 1)), 3)
    )
    update = torch.optim.Adam(cut.parameters(), 1e-2)
    for step in range(4):
        update.zero_grad()
        cut(
            torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(step))
        ).square().mean().backward()
        update.step()
    return [v for k, v in cut.state_dict().items() if k not in shares(cut)]


@pytest.mark.parametrize(
    "kind", ["sample", "height", "width", "filter", "channel", "replicate"]
)
def test_replicated_parameters_stay_equal_bit_for_bit(kind: str) -> None:
    first, *others = on_ranks(3, parameters_after_training, kind)
    assert first
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))


def statistics(kind: Any) -> Differences:
    """Samples and rows of very different values, so that an average of averages would show."""
    serial, cut = pair(normed, splits_of(normed(), (kind,), (5, 2, 1)), 3)
    x = (
        torch.randn(8, 3, 8, 8) * torch.logspace(-1, 1, 8)[:, None, None, None]
        + torch.linspace(-5, 3, 8)[:, None]
    )
    return one_step(serial, cut, x) | same_state(serial, cut)


@pytest.mark.parametrize("kind", ["sample", "height", "width", "filter", "channel"])
def test_batch_norm_weights_parts_by_their_counts(kind: str) -> None:
    assert_same(on_ranks(3, statistics, kind))
