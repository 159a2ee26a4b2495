"""Convolutions as products of columns: right, chosen where they are faster, and in steps as where measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hetconv import Split
from hetconv.autotune.subjects import Layer
from hetconv.kernels import aten, column_products, products
from hetconv.kernels.tiles import Pass
from hetconv.modules import HetConv2d
from hetconv.rules import Conv, SplitKind
from hetconv.spec import ConvSpec

from .products import NEEDED, WIDE, close, images, largest_error, long_vectors
from .spawn import on_ranks

SIDES = st.tuples(st.integers(0, 4), st.integers(0, 4))
ONES, NONE = (1, 1), ((0, 0), (0, 0))
pytestmark = NEEDED


@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)), taps=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)), padding=st.tuples(SIDES, SIDES),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)  # fmt: skip
def test_products_are_the_convolution_and_its_gradients(
    size: Any, taps: Any, stride: Any, padding: Any, dilation: Any
) -> None:
    """Also where taps meet padding alone, or stride leaves out what is last."""
    reach = [(t - 1) * d for t, d in zip(taps, dilation, strict=True)]
    if min(n + sum(sides) - r for n, sides, r in zip(size, padding, reach, strict=True)) < 1:
        return
    x, w, b = images(2, 5, *size), images(4, 5, *taps), torch.randn(4)
    in_double = x.double().requires_grad_(), w.double().requires_grad_()
    padded = nn.functional.pad(in_double[0], [n for sides in reversed(padding) for n in sides])
    y = nn.functional.conv2d(padded, in_double[1], b.double(), stride, dilation=dilation)
    g = images(*y.shape)
    of_input, of_filters = torch.autograd.grad(y, in_double, g.double())
    geometry = stride, padding, dilation
    close(column_products.forward(x, w, b, *geometry), y.detach())
    close(column_products.gradient_of_input(g, x.shape, w, *geometry), of_input)
    close(column_products.gradient_of_filters(g, x, w, *geometry), of_filters)


def test_results_are_channels_last_and_lie_close() -> None:
    """What comes after them goes by strides."""
    x, w, g, side = images(2, 5, 6, 7), images(4, 5, 3, 3), images(2, 4, 6, 7), ((1, 1), (1, 1))
    for found in (
        column_products.forward(x, w, None, ONES, side, ONES),
        column_products.gradient_of_input(g, x.shape, w, ONES, side, ONES),
        column_products.gradient_of_filters(g, x, w, ONES, side, ONES),
    ):
        assert found.is_contiguous(memory_format=WIDE)


def test_a_part_of_an_image_and_a_gradient_that_lies_otherwise_give_the_same() -> None:
    x, w, g = images(2, 5, 9, 12)[:, :, 2:8, 2:9], images(4, 5, 3, 3), images(2, 4, 6, 7)
    geometry = ONES, ((1, 1), (1, 1)), ONES
    expected = aten.torchs_gradients(g, x.contiguous(), w, *geometry, 1, (True, True, False))
    with long_vectors(1):
        assert column_products.fit(x, w, 1)
        for gradient in (g, g.contiguous()):
            for mine, theirs in zip(
                aten.backward(gradient, x, w, *geometry, 1, (True, True, False)), expected, strict=True
            ):
                assert (mine is None) == (theirs is None)
                if mine is not None and theirs is not None:
                    close(mine, theirs)


def chosen(x: Tensor, k: int, taps: int, size: int, stride: int = 1, groups: int = 1) -> tuple[Pass, ...]:
    w = torch.empty(k, x.shape[1] // groups, taps, taps).contiguous(memory_format=WIDE)
    return aten.by_products(x, w, (size, size), (stride, stride), groups)


def test_few_pixels_and_one_tap_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    every, filters = aten.PASSES, ("weight gradient",)
    torch.set_num_threads(1)
    with long_vectors() as patch:
        assert chosen(images(1, 512, 7, 7), 512, 3, 7) == every
        assert chosen(images(1, 256, 14, 14), 512, 3, 7, 2) == every
        assert chosen(images(1, 256, 14, 14), 256, 3, 14) == every
        assert chosen(images(1, 256, 14, 14), 176, 3, 14) == filters
        assert chosen(images(8, 512, 7, 7), 512, 3, 7) == filters
        assert chosen(images(1, 128, 28, 28), 128, 3, 28) == ()
        assert chosen(images(1, 128, 9, 9), 128, 5, 9) == ("forward", *filters)
        assert chosen(images(1, 64, 8, 8), 64, 3, 8) == ()
        assert chosen(images(1, 256, 56, 56), 64, 1, 56) == every
        assert chosen(images(1, 32, 56, 56), 32, 1, 56) == every[:2]
        assert chosen(images(16, 256, 14, 14), 64, 1, 14) == ()
        assert chosen(images(1, 512, 7, 7), 512, 3, 7, groups=2) == ()
        assert chosen(images(1, 512, 7, 7).contiguous(), 512, 3, 7) == ()
        assert chosen(images(1, 512, 7, 7).bfloat16(), 512, 3, 7) == ()
        torch.set_num_threads(2)
        assert chosen(images(1, 256, 56, 56), 64, 1, 56) == ()
        torch.set_num_threads(1)
        patch.setattr(products, "halved_by_mkl", lambda: False)
        column_products._are_faster.cache_clear()
        assert chosen(images(1, 256, 56, 56), 64, 1, 56) == ()
        assert chosen(images(1, 512, 7, 7), 512, 3, 7) == every
        patch.setattr(column_products, "long_vectors", lambda: False)
        monkeypatch.setattr(aten.tap_products, "short_vectors", lambda: False)
        assert chosen(images(1, 512, 7, 7), 512, 3, 7) == ()


@pytest.mark.parametrize("of", ["matmul", "conv"])
def test_who_wants_fewer_digits_or_no_onednn_gets_torchs(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = images(1, 5, 6, 6), images(4, 5, 3, 3)
    with long_vectors(1):
        assert column_products.fit(x, w, 1)
        before = getattr(torch.backends.mkldnn, of).fp32_precision
        getattr(torch.backends.mkldnn, of).fp32_precision = "bf16"
        try:
            assert not column_products.fit(x, w, 1)
            monkeypatch.setattr(products, "product", lambda *_: pytest.fail("a product by oneDNN"))
            products.linear(torch.randn(8, 6), torch.randn(5, 6), None)
        finally:
            getattr(torch.backends.mkldnn, of).fp32_precision = before
        torch._C._set_mkldnn_enabled(False)
        try:
            assert not column_products.fit(x, w, 1)
        finally:
            torch._C._set_mkldnn_enabled(True)
        assert column_products.fit(x, w, 1)


def test_torch_differentiates_what_asks_for_autograd() -> None:
    """A product has no gradient of its own."""
    x, w = images(1, 5, 6, 6).requires_grad_(), images(4, 5, 3, 3).requires_grad_()
    with long_vectors(1):
        y = aten.conv(x, w, None, ONES, NONE, ONES, 1)
        y.sum().backward()
    assert x.grad is not None
    assert w.grad is not None


def watched(patch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is computed by columns from now on."""
    calls = list[str]()
    for name in ("forward", "gradient_of_input", "gradient_of_filters"):
        right = getattr(column_products, name)
        patch.setattr(column_products, name, lambda *args, of=name, right=right: calls.append(of) or right(*args))
    return calls


def trained(kind: SplitKind) -> tuple[set[str], float]:
    """Which passes were products in a step of a layer, and the errors of its output and gradients."""
    plain = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=WIDE)  # type: ignore[call-overload]
    sizes = {"replicate": (), "filter": (5, 3), "channel": (3, 5)}.get(kind, (1, 1))
    cut = HetConv2d.from_conv(plain, Split(kind, sizes), output="split")
    with pytest.MonkeyPatch.context() as patch:
        calls = watched(patch)
        error = largest_error(plain, cut, images(2, 8, 6, 8).requires_grad_())
    return set(calls), error


@pytest.mark.parametrize("kind", ["replicate", "filter", "channel", "height", "width"])
def test_a_step_computes_products_where_what_is_measured_does(kind: SplitKind) -> None:
    for calls, error in on_ranks(2, trained, kind):
        assert calls == {"forward", "gradient_of_input", "gradient_of_filters"}
        assert error <= 1e-4


def test_a_device_alone_is_measured_as_a_plain_model_computes() -> None:
    op = Conv(ConvSpec(1, 16, (6, 6), 16, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))
    cpu = torch.device("cpu")
    with long_vectors(1) as patch:
        on_parts, alone = (Layer(op, "filters", "float32", alone=alone) for alone in (False, True))
        assert on_parts.as_torch(cpu) == (False, False)
        called = watched(patch)
        for layer, count in ((alone, 0), (on_parts, 3)):
            run = layer.run(16, cpu)
            run.forward()
            run.backward()
            assert len(called) == count
    with long_vectors():
        assert on_parts.as_torch(cpu) == (True, True)
