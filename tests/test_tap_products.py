"""The gradient of filters by products of matrices: right, chosen where it is faster, and in steps as where measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hetconv import Split
from hetconv.kernels import aten, tap_products
from hetconv.kernels.tap_products import are_faster, gradient_of_filters
from hetconv.modules import HetConv2d
from hetconv.rules import SplitKind
from hetconv.tensor import gather

from .equivalence import full_gradients
from .products import WIDE, images
from .spawn import on_ranks

SIDES = st.tuples(st.integers(0, 4), st.integers(0, 4))


@contextmanager
def everywhere() -> Iterator[pytest.MonkeyPatch]:
    """As on a CPU with short vectors, for the smallest convolutions too, in blocks of few rows."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FEWEST", "FEW", "LEAST"):
            patch.setattr(tap_products, name, 1)
        patch.setattr(tap_products, "BLOCK", 4 << 10)
        patch.setattr(tap_products, "short_vectors", lambda: True)
        yield patch


@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)), taps=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(SIDES, SIDES), dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)  # fmt: skip
def test_products_add_up_to_the_gradient(size: Any, taps: Any, padding: Any, dilation: Any) -> None:
    """Also where blocks of rows, or columns of taps, lie in the padding."""
    reach = [(t - 1) * d for t, d in zip(taps, dilation, strict=True)]
    out = [n + sum(sides) - r for n, sides, r in zip(size, padding, reach, strict=True)]
    if min(out) < 1:
        return
    x, w, g = images(2, 5, *size), images(4, 5, *taps), images(2, 4, *out)
    padded = nn.functional.pad(x.double(), [n for sides in reversed(padding) for n in sides])
    in_double = w.double().requires_grad_()
    y = nn.functional.conv2d(padded, in_double, dilation=dilation)
    (expected,) = torch.autograd.grad(y, in_double, g.double())
    with everywhere():
        found = gradient_of_filters(g, x, w, padding, dilation)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert found.stride() == w.stride()


def test_a_part_of_an_image_and_a_gradient_that_lies_otherwise_give_the_same() -> None:
    x, w, g = images(2, 5, 9, 12)[..., 2:9], images(4, 5, 3, 3), images(2, 4, 9, 7)
    padding, ones = ((1, 1), (1, 1)), (1, 1)
    expected = aten.backward(g, x.contiguous(), w, ones, padding, ones, 1, (False, True, False))[1]
    with everywhere():
        assert are_faster(x, w, 63, ones, 1)
        for gradient in (g, g.contiguous()):
            found = gradient_of_filters(gradient, x, w, padding, ones)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_all_gradients_are_there_that_are_wanted() -> None:
    x, w, g, ones = images(1, 5, 9, 12), images(4, 5, 3, 3), images(1, 4, 9, 12), (1, 1)
    args = (g, x, w, ones, ((1, 1), (1, 1)), ones, 1)
    expected = aten.backward(*args, (True, True, True))
    with everywhere():
        for wanted in [(True, True, True), (False, True, False), (True, False, True), (False, False, True)]:
            for mine, theirs, asked in zip(aten.backward(*args, wanted), expected, wanted, strict=True):
                assert (mine is not None) == asked
                if mine is not None:
                    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_others_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, ones = images(1, 48, 4, 4), torch.zeros(48, 48, 3, 3), (1, 1)
    monkeypatch.setattr(tap_products, "short_vectors", lambda: True)
    assert are_faster(x, w, 1 << 12, ones, 1)
    assert are_faster(x, torch.zeros(3, 48, 1, 3), 1 << 16, ones, 1)
    assert not are_faster(x, w, 1 << 8, ones, 1)
    assert not are_faster(x, torch.zeros(48, 48, 1, 1), 1 << 16, ones, 1)
    assert not are_faster(x, w, 1 << 12, (2, 2), 1)
    assert not are_faster(x, torch.zeros(48, 24, 3, 3), 1 << 16, ones, 2)
    assert not are_faster(images(1, 3, 4, 4), torch.zeros(48, 3, 3, 3), 1 << 16, ones, 1)
    assert not are_faster(images(1, 16, 4, 4), torch.zeros(16, 16, 3, 3), 1 << 16, ones, 1)
    assert not are_faster(x.contiguous(), w, 1 << 12, ones, 1)
    assert not are_faster(x.bfloat16(), w, 1 << 12, ones, 1)
    assert not are_faster(torch.zeros(1, 48, 4, 4, 4), torch.zeros(48, 48, 3, 3, 3), 1 << 12, (1, 1, 1), 1)
    monkeypatch.setattr(tap_products, "short_vectors", lambda: False)
    assert not are_faster(x, w, 1 << 12, ones, 1)


def trained(kind: SplitKind) -> tuple[int, float]:
    """How often the gradient of filters was summed of products in a step of a layer, and its error."""
    plain = nn.Conv2d(6, 8, 3, padding=1).to(memory_format=WIDE)  # type: ignore[call-overload]
    sizes = {"replicate": (), "filter": (4, 4), "channel": (3, 3)}.get(kind, (1, 1))
    cut = HetConv2d.from_conv(plain, Split(kind, sizes), output="split")
    x = images(2, 6, 9, 40)
    plain(x).square().sum().backward()
    with everywhere() as patch:
        calls = list[int]()
        patch.setattr(tap_products, "gradient_of_filters", lambda *args: calls.append(1) or gradient_of_filters(*args))
        gather(cut(x)).square().sum().backward()
    expected, found = plain.weight.grad, full_gradients(cut)["weight"]
    assert expected is not None
    assert found is not None
    return len(calls), float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", ["replicate", "filter", "channel", "height", "width"])
def test_a_step_sums_products_where_what_is_measured_does(kind: SplitKind) -> None:
    for calls, error in on_ranks(2, trained, kind):
        assert calls
        assert error <= 1e-4
