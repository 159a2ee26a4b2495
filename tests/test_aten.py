"""What hetconv computes around ATen's convolutions on a CPU: where oneDNN's gradient of filters leaves its memory, or
takes long.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetconv import Split, kernels
from hetconv.kernels import aten
from hetconv.kernels.aten import outgrows, overruns
from hetconv.modules import HetConv2d
from hetconv.rules import SplitKind
from hetconv.tensor import gather

from .equivalence import full_gradients
from .spawn import on_ranks

STEPS = 10  # after a few of which a spoilt heap has ended the process


@pytest.mark.parametrize("channels", [7, 8, 15])
def test_strided_filters_of_few_channels_have_their_gradient(channels: int) -> None:
    """Of 56 x 56 channels-last pixels, which torch 2.13 dies of on some CPUs."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, channels, 56, 56, generator=random).contiguous(memory_format=torch.channels_last)
    w = torch.randn(128, channels, 1, 1, generator=random)
    g = torch.randn(3, 128, 28, 28, generator=random).contiguous(memory_format=torch.channels_last)
    kept: list[Any] = []
    for size in range(STEPS):
        kept += [torch.empty(17 + size), kernels.conv_backward(g, x, w, (2, 2), ((0, 0),) * 2, (1, 1), 1, (True,) * 3)]
    expected = torch.einsum("nkpq,ncpq->kc", g.double(), x.double()[:, :, ::2, ::2])
    for gx, gw, gb in kept[1::2]:
        torch.testing.assert_close(gw[:, :, 0, 0].double(), expected, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(gb, g.sum((0, 2, 3)))
        assert gx.shape == x.shape
        assert not gx[:, :, 1::2].any()


@pytest.mark.parametrize(
    ("size", "stride", "padding", "groups"),
    [((9,), (2,), ((1, 0),), 1), ((7, 8), (3, 1), ((0, 0), (2, 1)), 2), ((5, 4, 6), (1, 2, 3), ((0, 0),) * 3, 3)],
)
def test_gradients_of_the_pixels_that_are_read(size: Any, stride: Any, padding: Any, groups: int) -> None:
    """Of any rank, with padding per side and groups."""
    spatial = len(size)
    x = torch.randn(2, 6, *size, dtype=torch.float64)
    w = torch.randn(12, 6 // groups, *(1,) * spatial, dtype=torch.float64)
    assert overruns(tuple(w.shape), stride)

    def torchs(x: Tensor, w: Tensor) -> Tensor:
        conv = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
        padded = F.pad(x, [n for side in reversed(padding) for n in side])
        return conv(padded, w, None, stride, 0, 1, groups)

    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = torchs(*leaves)
    g = torch.randn_like(y)
    expected = torch.autograd.grad(y, leaves, g)
    found = kernels.conv_backward(g, x, w, stride, padding, (1,) * spatial, groups, (True, True, False))
    assert found[2] is None
    for mine, theirs in zip(found, expected, strict=False):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("width", "padding", "dilation"),
    [
        (21, ((1, 1), (1, 1)), (1, 1)),
        (21, ((0, 2), (3, 0)), (2, 2)),
        (20, ((1, 0), (9, 11)), (1, 3)),  # some blocks lie in the padding
        (1, ((1, 1), (7, 7)), (1, 1)),
    ],
)
def test_gradients_of_blocks_of_columns_add_up(
    width: int, padding: Any, dilation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, wide = torch.Generator().manual_seed(0), torch.channels_last
    x = torch.randn(2, 5, 9, width, generator=random).contiguous(memory_format=wide)
    w = torch.randn(4, 5, 3, 3, generator=random).contiguous(memory_format=wide)
    y = aten.conv(x, w, None, (1, 1), padding, dilation, 1)
    g = torch.randn(y.shape, generator=random).contiguous(memory_format=wide)
    args = (g, x, w, (1, 1), padding, dilation, 1, (True, True, True))
    expected = aten.backward(*args)
    monkeypatch.setattr(aten, "NEAREST", 0)
    monkeypatch.setattr(aten, "COLUMNS", 4 * 5 * 4)  # four of them
    monkeypatch.setattr(aten, "short_vectors", lambda: True)
    assert outgrows(x, w, g.shape[-1], (1, 1), 1)
    for mine, theirs in zip(aten.backward(*args), expected, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_rows_that_a_cache_holds_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def x(channels: int, width: int) -> Tensor:
        return torch.zeros(1, channels, 3, width).contiguous(memory_format=torch.channels_last)

    w, ones = torch.zeros(48, 48, 3, 3), (1, 1)
    monkeypatch.setattr(aten, "short_vectors", lambda: True)
    assert outgrows(x(48, 256), w, 256, ones, 1)
    assert outgrows(x(48, 256), torch.zeros(3, 48, 3, 3), 256, ones, 1)
    assert not outgrows(x(48, 128), w, 128, ones, 1)
    assert not outgrows(x(48, 256), w, 256, (2, 2), 1)
    assert not outgrows(x(48, 256), torch.zeros(48, 24, 3, 3), 256, ones, 2)
    assert not outgrows(x(48, 256).contiguous(), w, 256, ones, 1)
    assert not outgrows(x(48, 256).bfloat16(), w, 256, ones, 1)
    assert not outgrows(x(256, 256), torch.zeros(256, 256, 3, 3), 256, ones, 1)
    monkeypatch.setattr(aten, "short_vectors", lambda: False)
    assert not outgrows(x(48, 256), w, 256, ones, 1)


def trained_by_columns(kind: SplitKind) -> tuple[int, float]:
    """How often the gradient of filters was summed over columns, in a step of a layer on a CPU with short vectors; and
    its error.
    """
    plain = nn.Conv2d(6, 8, 3, padding=1).to(memory_format=torch.channels_last)
    sizes = {"replicate": (), "filter": (4, 4), "channel": (3, 3)}.get(kind, (1, 1))
    cut = HetConv2d.from_conv(plain, Split(kind, sizes), output="split")
    x = torch.randn(2, 6, 9, 40, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=torch.channels_last
    )
    plain(x).square().sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        calls, real = list[int](), aten._by_columns
        patch.setattr(aten, "NEAREST", 0)
        patch.setattr(aten, "short_vectors", lambda: True)
        patch.setattr(aten, "_by_columns", lambda *args: calls.append(1) or real(*args))
        gather(cut(x)).square().sum().backward()
    expected, found = plain.weight.grad, full_gradients(cut)["weight"]
    assert expected is not None
    assert found is not None
    return len(calls), float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", ["replicate", "filter", "channel", "height", "width"])
def test_a_step_sums_over_columns_as_what_is_measured_does(kind: SplitKind) -> None:
    for calls, error in on_ranks(2, trained_by_columns, kind):
        assert calls
        assert error <= 1e-4


def test_others_are_torchs_own() -> None:
    assert not overruns((128, 16, 1, 1), (2, 2))
    assert not overruns((128, 8, 1, 1), (1, 1))
    assert not overruns((128, 8, 3, 3), (2, 2))


def trained() -> float:
    """The error of the gradients of such a layer, cut by channel so that one rank has few of them."""
    plain = nn.Conv2d(24, 128, 1, 2).to(memory_format=torch.channels_last)
    cut = HetConv2d.from_conv(plain, Split("channel", (16, 8)), output="split")
    x = torch.randn(3, 24, 56, 56).contiguous(memory_format=torch.channels_last)
    for _ in range(STEPS):
        cut.zero_grad()
        gather(cut(x)).sum().backward()
    expected = x[:, :, ::2, ::2].double().sum((0, 2, 3))
    found = full_gradients(cut)["weight"]
    assert found is not None
    return float((found[:, :, 0, 0].double() - expected).abs().max() / expected.abs().max())


def test_a_split_that_leaves_few_channels_trains() -> None:
    for error in on_ranks(2, trained):
        assert error <= 1e-4
