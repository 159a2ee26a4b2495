"""What hetconv computes around ATen's convolutions on a CPU: where oneDNN's gradient of
filters leaves its memory, or takes long.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetconv import kernels
from hetconv.kernels import aten
from hetconv.kernels.aten import overruns
from hetconv.nn.layers import HetConv2d
from hetconv.runtime.het_tensor import gather
from hetconv.sharding.conv_spec import ConvGeometry, Padding
from hetconv.sharding.split import Split
from tests.equivalence import full_gradients
from tests.spawn import on_ranks

STEPS = 10  # after a few of which a spoilt heap has ended the process


@pytest.mark.parametrize("channels", [7, 8, 15])
def test_strided_filters_of_few_channels_have_their_gradient(channels: int) -> None:
    """Of 56 x 56 channels-last pixels, which torch 2.13 dies of on some CPUs."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, channels, 56, 56, generator=random).contiguous(
        memory_format=torch.channels_last
    )
    w = torch.randn(128, channels, 1, 1, generator=random)
    g = torch.randn(3, 128, 28, 28, generator=random).contiguous(
        memory_format=torch.channels_last
    )
    kept: list[Any] = []
    for size in range(STEPS):
        kept += [
            torch.empty(17 + size),
            kernels.conv_backward(
                g, x, w, (2, 2), ((0, 0),) * 2, (1, 1), 1, (True,) * 3
            ),
        ]
    expected = torch.einsum("nkpq,ncpq->kc", g.double(), x.double()[:, :, ::2, ::2])
    for gx, gw, gb in kept[1::2]:
        torch.testing.assert_close(
            gw[:, :, 0, 0].double(), expected, rtol=1e-4, atol=1e-3
        )
        torch.testing.assert_close(gb, g.sum((0, 2, 3)))
        assert gx.shape == x.shape
        assert not gx[:, :, 1::2].any()


@pytest.mark.parametrize(
    ("size", "stride", "padding", "groups"),
    [
        ((9,), (2,), ((1, 0),), 1),
        ((7, 8), (3, 1), ((0, 0), (2, 1)), 2),
        ((5, 4, 6), (1, 2, 3), ((0, 0),) * 3, 3),
    ],
)
def test_gradients_of_the_pixels_that_are_read(
    size: Any, stride: Any, padding: Any, groups: int
) -> None:
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
    found = kernels.conv_backward(
        g, x, w, stride, padding, (1,) * spatial, groups, (True, True, False)
    )
    assert found[2] is None
    for mine, theirs in zip(found, expected, strict=False):
        torch.testing.assert_close(mine, theirs)


def test_others_are_torchs_own() -> None:
    assert not overruns((128, 16, 1, 1), (2, 2))
    assert not overruns((128, 8, 1, 1), (1, 1))
    assert not overruns((128, 8, 3, 3), (2, 2))


def processor(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)


@pytest.mark.parametrize("padding", [((1, 1), (1, 1)), ((0, 1), (2, 1))])
@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False)])
def test_filters_of_channels_last_images_have_their_gradient(
    padding: Padding, wanted: aten.Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without AVX-512 it is that of contiguous copies, and lies as the filters do."""
    seeded = torch.Generator().manual_seed(0)
    x, w = (torch.rand(s, generator=seeded) for s in ((2, 3, 9, 8), (4, 3, 3, 3)))
    geometry = ConvGeometry((1, 1), padding, (1, 1), 1)
    y = aten.conv(x, w, None, geometry)
    tensors = [
        t.to(memory_format=torch.channels_last)
        for t in (torch.rand(y.shape, generator=seeded), x, w)
    ]
    found = []
    for capability in ("AVX512", "AVX2"):
        processor(capability, monkeypatch)
        is_slow = aten.is_slow_channels_last(*tensors[1:], groups=1)
        assert is_slow == (capability == "AVX2")
        found.append(aten.backward(*tensors, geometry, wanted))
    for usual, copied in zip(*found, strict=True):
        assert (usual is None) == (copied is None)
        if usual is not None and copied is not None:
            torch.testing.assert_close(copied, usual)
            assert copied.stride() == usual.stride()


@pytest.mark.parametrize(
    ("shape", "groups", "dtype"),
    [
        ((4, 8, 1, 1), 1, torch.float32),
        ((8, 1, 3, 3), 8, torch.float32),
        ((4, 8, 3, 3), 1, torch.bfloat16),
    ],
    ids=["one tap", "depthwise", "bfloat16"],
)
def test_other_filters_are_as_fast_channels_last(
    shape: tuple[int, ...],
    groups: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processor("AVX2", monkeypatch)
    x = torch.empty(2, 8, 9, 9, dtype=dtype).to(memory_format=torch.channels_last)
    assert not aten.is_slow_channels_last(x, torch.empty(shape, dtype=dtype), groups)


def trained() -> float:
    """The error of the gradients of such a layer, cut by channel so that one rank has
    few of them.
    """
    plain = nn.Conv2d(24, 128, 1, 2).to(memory_format=torch.channels_last)
    cut = HetConv2d.from_conv(plain, Split("channel", (16, 8)), output="split")
    x = torch.randn(3, 24, 56, 56).contiguous(memory_format=torch.channels_last)
    for _ in range(STEPS):
        cut.zero_grad()
        gather(cut(x)).sum().backward()
    expected = x[:, :, ::2, ::2].double().sum((0, 2, 3))
    found = full_gradients(cut)["weight"]
    assert found is not None
    return float(
        (found[:, :, 0, 0].double() - expected).abs().max() / expected.abs().max()
    )


def test_a_split_that_leaves_few_channels_trains() -> None:
    for error in on_ranks(2, trained):
        assert error <= 1e-4
