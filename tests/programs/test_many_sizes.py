"""A program whose inputs come in ever new sizes: results stay right, and memory stays bounded."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hetconv
from hetconv.nn.model_call import EntryForward
from hetconv.sharding.split import Split
from hetconv.signature_cache import SignatureCaches
from tests.equivalence import Differences, apart, assert_same, full_gradients
from tests.nets import plan_of
from tests.spawn import Pool, on_ranks

SPLITS = {
    "0": Split("height", (5, 3)),
    "4": Split("filter", (5, 3)),
    "8": Split("height", (5, 3)),
}
SIZES, LEVEL_AT, MOST_GROWTH = 2000, 300, 30.0  # megabytes


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(8, 4, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
    )


def sizes(count: int) -> Iterator[tuple[int, int]]:
    """As many different ones, small ones and large ones in turn."""
    for k in range(count):
        number = k * 617 % 2000  # prime to it: each once
        yield 8 + number % 50, 8 + number // 50


def caches_of(model: nn.Module) -> SignatureCaches:
    forward = model.forward
    assert isinstance(forward, EntryForward)
    return forward._context._caches


def differences() -> Differences:
    """After three passes whose backward passes come when another signature is current,
    of more sizes than are kept.
    """
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain = net()
    cut = hetconv.parallelize(
        copy.deepcopy(plain), plan_of(plain, SPLITS, 2), signatures=2
    )
    for some in range(0, 6, 3):
        losses: list[Tensor] = []
        for h, w in list(sizes(7))[some : some + 3]:
            x = torch.randn(2, 3, h, w)
            losses += cut(x).square().sum(), plain(x).square().sum()
        for loss in losses:
            loss.backward()
    assert len(caches_of(cut)._known) == 2
    gradients = full_gradients(cut)
    found = {
        f"gradient {k}": apart(gradients[k], p.grad)
        for k, p in plain.named_parameters()
    }
    copied = copy.deepcopy(cut)
    assert not caches_of(copied)._known
    x = torch.randn(2, 3, 9, 8)
    for model in (plain, cut, copied):
        model.eval()
    return found | {
        "output": apart(cut(x), plain(x)),
        "output of a copy": apart(copied(x), plain(x)),
    }


def growth(count: int) -> float:
    """Megabytes that this rank's memory grew by, from the ``LEVEL_AT``-th size to the last."""
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = (
        "8"  # PyTorch's own memory of sizes, full at 1024
    )
    model = net()
    cut = hetconv.parallelize(model, plan_of(model, SPLITS, 2))
    level = 0.0
    for i, (h, w) in enumerate(sizes(count)):
        with torch.set_grad_enabled(i % 4 == 0):
            y = cut(torch.randn(1, 3, h, w)).sum()
        if y.requires_grad:
            y.backward()
        if i == LEVEL_AT:
            level = resident()
    return resident() - level


def resident() -> float:
    gc.collect()
    return (
        int(Path("/proc/self/statm").read_text("ascii").split()[1])
        * os.sysconf("SC_PAGESIZE")
        / 1e6
    )


def test_forgotten_sizes_are_right_when_they_come_again() -> None:
    assert_same(on_ranks(2, differences))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_stays_at_its_level() -> None:
    pool = Pool(2, timeout=timedelta(minutes=4))
    try:
        found = pool.outcomes(growth, SIZES)
    finally:
        pool.close()
    assert all(ok and megabytes < MOST_GROWTH for ok, megabytes in found), found


def refusal() -> str:
    with pytest.raises(hetconv.HetConvError) as caught:
        hetconv.parallelize(net(), plan_of(net(), SPLITS, 2), signatures=0)
    return str(caught.value)


def test_no_signature_at_all_is_refused() -> None:
    assert all("signatures is 0" in said for said in on_ranks(2, refusal))
