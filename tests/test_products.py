"""Products of matrices by oneDNN: right, chosen where they are faster, and what split linear layers multiply by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetconv import Split
from hetconv.kernels import aten, products
from hetconv.modules import HetLinear
from hetconv.rules import SplitKind
from hetconv.transport import team_of

from .products import NEEDED, close, largest_error, long_vectors
from .spawn import on_ranks

pytestmark = NEEDED


@pytest.mark.parametrize(("k", "c", "m"), [(3, 9, 40), (200, 9, 40), (200, 2, 40)])
def test_the_smaller_matrix_is_copied_and_the_sum_is_the_same(k: int, c: int, m: int) -> None:
    g, x = torch.randn(m, k), torch.randn(m, c)
    found = products.summed_rows(g, x)
    close(found, g.t() @ x)
    assert found.is_contiguous()


@pytest.mark.parametrize("turned", [False, True])
def test_matrices_that_lie_with_gaps_are_copied(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are oneDNN takes a thousand times as long."""
    a, b = torch.randn(6, 9)[:, :5], torch.randn(7, 9)[:, :5]
    b = torch.randn(9, 7)[:5].t() if turned else b
    given = list[Tensor]()
    right = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *args: given.extend(args[:2]) or right(*args))
    close(products.product(a, b), a @ b.t())
    assert given[0].is_contiguous()
    assert given[1].is_contiguous() or given[1].t().is_contiguous()
    assert (given[1].data_ptr() == b.data_ptr()) == turned


def linear_trained(kind: SplitKind, sizes: tuple[int, ...]) -> tuple[int, float]:
    """How many products by oneDNN a step of a split linear layer took, and its largest error."""
    plain = nn.Linear(12, 8)
    cut = HetLinear(plain, Split(kind, sizes), team_of())
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        taken, right = list[int](), products.product
        patch.setattr(products, "product", lambda *args: taken.append(1) or right(*args))
        error = largest_error(plain, cut, x)
    return len(taken), error


@pytest.mark.parametrize(
    ("kind", "sizes"), [("replicate", ()), ("filter", (5, 3)), ("channel", (4, 8)), ("sample", (3, 3))]
)
def test_linear_layers_multiply_by_onednn(kind: SplitKind, sizes: tuple[int, ...]) -> None:
    for taken, error in on_ranks(2, linear_trained, kind, sizes):
        assert taken == 3
        assert error <= 1e-4


def test_products_of_linear_layers_are_chosen_where_they_are_faster() -> None:
    with long_vectors() as patch:
        torch.set_num_threads(1)
        assert all(products.are_faster(what, 197, 3072, 768) for what in aten.PASSES)
        assert all(products.are_faster(what, 4096, 384, 96) for what in aten.PASSES)
        assert not any(products.are_faster(what, 1, 4096, 4096) for what in aten.PASSES)
        assert not any(products.are_faster(what, 64, 64, 64) for what in aten.PASSES)
        torch.set_num_threads(2)
        assert [products.are_faster(what, 4096, 384, 96) for what in aten.PASSES] == [True, True, False]
        patch.setattr(products, "halved_by_mkl", lambda: False)
        assert not products.are_faster("forward", 197, 3072, 768)


def test_other_numbers_than_float32_are_torchs() -> None:
    with long_vectors(1) as patch:
        patch.setattr(products, "product", lambda *_: pytest.fail("a product by oneDNN"))
        g, x, w = (torch.randn(shape, dtype=torch.float64) for shape in ((8, 5), (8, 6), (5, 6)))
        assert torch.equal(products.linear(x, w, None), nn.functional.linear(x, w))
        assert torch.equal(products.gradient_of_rows(g, w), g @ w)
        assert torch.equal(products.gradient_of_weights(g, x), g.t() @ x)
