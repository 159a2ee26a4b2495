"""Serial equivalence: models of many shapes and habits train on several ranks as they do on one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hetconv
from hetconv.sharding.split import SplitKind
from tests.equivalence import (
    Differences,
    assert_same,
    full_gradients,
    loss_of,
    one_step,
    pair,
    same_state,
    train,
)
from tests.nets import IMAGE_KINDS, NETS, SuperResolution, Twice, plan_of, splits_of
from tests.spawn import on_ranks
from tests.strategies import weights

RATIOS = ((3, 1), (5, 2, 1), (1, 0, 2), (1, 1, 1, 1))
MIXES: tuple[tuple[SplitKind, ...], ...] = (
    ("filter", "channel"),
    ("height", "width"),
    ("height", "filter", "channel"),
    ("sample", "channel", "height"),
    ("replicate", "width", "sample"),
)


def trained(
    net: str,
    kinds: tuple[SplitKind, ...],
    ratio: tuple[int, ...],
    optimizer: str,
    steps: int,
    whole: bool = False,
) -> Differences:
    make, shape = NETS[net]
    return train(
        make,
        splits_of(make(), kinds, ratio, whole),
        shape,
        len(ratio),
        optimizer,
        steps,
    )


@pytest.mark.parametrize("kind", IMAGE_KINDS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_training_a_resnet_split_one_way(
    ratio: tuple[int, ...], kind: SplitKind
) -> None:
    assert_same(on_ranks(len(ratio), trained, "resnet", (kind,), ratio, "sgd", 5))


@pytest.mark.parametrize("mix", MIXES, ids="-".join)
@pytest.mark.parametrize("net", NETS)
def test_training_with_a_mix_of_splits(net: str, mix: tuple[SplitKind, ...]) -> None:
    assert_same(on_ranks(3, trained, net, mix, (5, 2, 1), "adam", 5))


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_training_where_one_device_sits_out(net: str, kind: SplitKind) -> None:
    assert_same(on_ranks(3, trained, net, (kind,), (1, 0, 2), "sgd", 2))


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_training_on_one_rank(net: str, kind: SplitKind) -> None:
    """Where nothing is summed."""
    assert_same(on_ranks(1, trained, net, (kind,), (1,), "sgd", 3))


@st.composite
def mixed(draw: st.DrawFn) -> tuple[str, tuple[SplitKind, ...], tuple[int, ...], bool]:
    ratio = draw(st.integers(2, 4).flatmap(weights))
    kinds = draw(st.lists(st.sampled_from(IMAGE_KINDS), min_size=1, max_size=6))
    return draw(st.sampled_from(sorted(NETS))), tuple(kinds), ratio, draw(st.booleans())


@settings(max_examples=40)
@given(mixed())
def test_any_kinds_in_any_ratio(
    case: tuple[str, tuple[SplitKind, ...], tuple[int, ...], bool],
) -> None:
    net, kinds, ratio, whole = case
    assert_same(on_ranks(len(ratio), trained, net, kinds, ratio, "sgd", 1, whole))


class Mapped(nn.Module):
    """Takes a keyword, returns a nested structure."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor, *, scale: float = 2.0) -> dict[str, Any]:
        y = self.one(x)
        return {"features": [y, y.relu()], "out": (self.two(y) * scale, 3)}


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = SuperResolution()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner.head(x)
        y = checkpoint(
            lambda t: t + self.inner.scale * torch.tanh(self.inner.body(t)),
            y,
            use_reentrant=False,
        )
        return checkpoint(
            lambda t: self.inner.shuffle(self.inner.tail(t)), y, use_reentrant=False
        )


class Frozen(nn.Module):
    """A frozen stem under trained layers, a frozen norm among them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.stem.requires_grad_(False), self.bn.requires_grad_(False)
        self.body, self.bn2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.body(F.relu(self.bn(self.stem(x)))))


class Frequent(nn.Module):
    """Norms, losses and functions that have no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.LayerNorm([4, 8, 8])
        self.attention = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        tokens = y.flatten(2).transpose(1, 2)
        weights = torch.softmax(self.attention(tokens) @ tokens.mT, dim=-1)
        return (
            (weights @ tokens).mean(dim=(1, 2))
            + torch.einsum("nchw->n", y)
            + y[:, 0, 0, 0]
        )


SPECIAL: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "twice": (Twice, (2, 4, 7, 6)),
    "mapped": (Mapped, (2, 3, 6, 7)),
    "checkpointed": (Checkpointed, (1, 3, 9, 8)),
    "frozen": (Frozen, (3, 3, 7, 8)),
    "frequent": (Frequent, (2, 3, 8, 8)),
}


def special(net: str, kind: SplitKind, ratio: tuple[int, ...]) -> Differences:
    make, shape = SPECIAL[net]
    serial, cut = pair(make, splits_of(make(), (kind,), ratio), len(ratio))
    updates = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1)
        for m in (serial, cut)
    ]
    found = one_step(serial, cut, torch.randn(shape))
    for update in updates:
        update.step()
    return found | same_state(serial, cut)


@pytest.mark.parametrize("kind", IMAGE_KINDS)
@pytest.mark.parametrize("net", SPECIAL)
def test_models_with_habits(net: str, kind: SplitKind) -> None:
    assert_same(on_ranks(3, special, net, kind, (2, 0, 1)))


def rounding(net: str, kind: SplitKind) -> tuple[float, float]:
    """Errors of bfloat16 autocast against float32, split and serial: one number for
    output and gradients together.
    """
    make, shape = NETS[net]
    torch.manual_seed(0)
    truth = make()
    serial, cut = copy.deepcopy(truth), copy.deepcopy(truth)
    cut = hetconv.parallelize(cut, plan_of(cut, splits_of(cut, (kind,), (2, 1)), 2))
    x = torch.randn(shape)
    results = [truth(x)]
    with torch.autocast("cpu", torch.bfloat16):
        results += [serial(x), cut(x)]
    for y in results:
        loss_of(y).backward()
    assert results[1].dtype == results[2].dtype
    gradients = [
        {k: p.grad for k, p in m.named_parameters()} for m in (truth, serial)
    ] + [full_gradients(cut)]
    exact, *rounded = (
        torch.cat([y.detach().float().flatten(), *(g[k].flatten() for k in g)])
        for y, g in zip(results, gradients, strict=True)
    )
    errors = [float((r - exact).norm() / exact.norm()) for r in rounded]
    return errors[0], errors[1]


@pytest.mark.parametrize("kind", IMAGE_KINDS)
@pytest.mark.parametrize("net", NETS)
def test_mixed_precision_rounds_no_worse_than_on_one_device(
    net: str, kind: SplitKind
) -> None:
    for serial, cut in on_ranks(2, rounding, net, kind):
        assert 0 < cut <= 3 * serial
