"""A program whose inputs come in ever new sizes: results stay right, and memory stays bounded."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetconv
from hetconv.nn import layers
from hetconv.nn.model_call import EntryForward
from hetconv.ops import trial_run
from hetconv.sharding.split import Split
from hetconv.signature_cache import SignatureCaches
from tests.equivalence import Differences, apart, assert_same, full_gradients
from tests.nets import plan_of
from tests.spawn import on_ranks

SPLITS = {
    "0": Split("height", (5, 3)),
    "4": Split("filter", (5, 3)),
    "8": Split("height", (5, 3)),
}


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


def growth(count: int, kept: int) -> int:
    """Objects of Python that there are more of after half as many sizes again.

    The first count clears caches, whose entries are then made anew beside those in use.
    """
    gc.unfreeze()  # caches are among what was there from the start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "MAX_CACHED_CASES", kept)
        return _growth(count, kept)


def _growth(count: int, kept: int) -> int:
    model = net()
    cut = hetconv.parallelize(model, plan_of(model, SPLITS, 2), signatures=kept)
    found: list[int] = []
    for i, (h, w) in enumerate(sizes(3 * count), 1):
        with torch.set_grad_enabled(i % 4 == 0):
            y = cut(torch.randn(1, 3, h, w)).sum()
        if y.requires_grad:
            y.backward()
        del y
        if i % count == 0:
            found.append(objects())
    return found[2] - found[1]


def objects() -> int:
    """How many there are but for those of caches that keep a given number of entries."""
    for cache in bounded_caches():
        cache.cache_clear()
    trial_run._recent._known.clear()
    gc.collect()
    return len(gc.get_objects())


def bounded_caches() -> list[Any]:
    return [
        cache
        for cache in gc.get_objects()
        if type(cache) is functools._lru_cache_wrapper
        and str(cache.__module__).startswith("hetconv.")
        and cache.cache_parameters()["maxsize"] is not None
    ]


def test_forgotten_sizes_are_right_when_they_come_again() -> None:
    assert_same(on_ranks(2, differences))


def test_memory_stays_at_its_level() -> None:
    """What is kept of the last few sizes differs by some objects from size to size."""
    kept = 8
    count = 5 * kept
    assert max(on_ranks(2, growth, count, kept)) < count / 2


def refusal() -> str:
    with pytest.raises(hetconv.HetConvError) as caught:
        hetconv.parallelize(net(), plan_of(net(), SPLITS, 2), signatures=0)
    return str(caught.value)


def test_no_signature_at_all_is_refused() -> None:
    assert all("signatures is 0" in said for said in on_ranks(2, refusal))
