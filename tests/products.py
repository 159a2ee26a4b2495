"""What tests of products of matrices share: processors on which they are chosen, and a step beside torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from hetconv.kernels import column_products, processor, products
from hetconv.modules import CutLayer
from hetconv.tensor import gather

from .equivalence import full_gradients, relative

WIDE = torch.channels_last
NEEDED = pytest.mark.skipif(not processor.has_products(), reason="this torch multiplies no matrices by oneDNN")


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=WIDE)


@contextmanager
def long_vectors(least: int | None = None) -> Iterator[pytest.MonkeyPatch]:
    """As on a CPU with long vectors, of which MKL uses half; for the ``least`` convolutions too."""
    column_products._are_faster.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_products, "long_vectors", lambda: True)
        patch.setattr(products, "halved_by_mkl", lambda: True)
        if least is not None:
            for module, names in (
                (column_products, ("FEWEST", "LEAST", "FOR_EACH_TAP")),
                (products, ("FEWEST", "LEAST", "WIDE")),
            ):
                for name in names:
                    patch.setattr(module, name, least)
            for name in ("FEW", "FEW_OF_WIDE", "FEW_OF_GRADIENT", "FOR_EACH"):
                patch.setattr(column_products, name, 1 << 20)
        yield patch
    column_products._are_faster.cache_clear()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-4)


def largest_error(plain: nn.Conv2d | nn.Linear, cut: CutLayer, x: Tensor) -> float:
    """Of the output and the gradients of a step by products where they fit, against the plain layer's own."""
    expected = plain(x)
    expected.square().sum().backward()
    expected_gx, x.grad = x.grad, None
    with long_vectors(1):
        y = gather(cut(x))
        y.square().sum().backward()
    pairs = [(y, expected), (x.grad, expected_gx), (full_gradients(cut)["weight"], plain.weight.grad)]
    return max(relative(a, b) for a, b in pairs)
