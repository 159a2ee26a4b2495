"""Products of matrices by oneDNN, where these are faster than MKL's, which torch takes: linear layers on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from .processor import halved_by_mkl, has_products, in_full
from .tiles import Pass

FEWEST, LEAST = 8, 1 << 21  # rows or columns of a matrix, multiplications: of less, a call takes too long
WIDE = 64  # columns, of one of both, from which on the gradient of weights pays
TALL = 512, 32  # rows, for each column, up to which it does: of one thread, and of several


def product(a_MC: Tensor, b_KC: Tensor, bias_K: Tensor | None = None) -> Tensor:
    """a @ b.T + bias, (M, K), of float32, by oneDNN. ``b`` may be a transposed matrix as it lies.

    What lies with gaps is copied first: oneDNN would take a thousand times as long.
    """
    b_KC = b_KC if b_KC.t().is_contiguous() else b_KC.contiguous()
    found: Tensor = torch.ops.mkldnn._linear_pointwise(a_MC.contiguous(), b_KC, bias_K, "none", [], "")
    return found


def are_faster(what: Pass, m: int, k: int, c: int) -> bool:
    """Whether they are for this pass of a linear layer, of ``m`` rows, ``k`` outputs and ``c`` inputs, in float32."""
    if not halved_by_mkl() or not has_products() or min(m, k, c) < FEWEST or m * k * c < LEAST:
        return False
    tall = m > min(k, c) * TALL[torch.get_num_threads() > 1]
    return what != "weight gradient" or (max(k, c) >= WIDE and not tall)


def linear(x_MC: Tensor, w_KC: Tensor, bias_K: Tensor | None) -> Tensor:
    """x @ w.T + bias, (M, K), without autograd."""
    if _fit("forward", x_MC, w_KC, len(x_MC), *w_KC.shape):
        return product(x_MC, w_KC, bias_K)
    return torch.nn.functional.linear(x_MC, w_KC, bias_K)


def gradient_of_rows(g_MK: Tensor, w_KC: Tensor) -> Tensor:
    """g @ w, (M, C): of the input of `linear`."""
    if _fit("input gradient", g_MK, w_KC, len(g_MK), *w_KC.shape):
        return product(g_MK, w_KC.t())
    return g_MK @ w_KC


def gradient_of_weights(g_MK: Tensor, x_MC: Tensor) -> Tensor:
    """g.T @ x, (K, C): of the weights of `linear`."""
    if _fit("weight gradient", g_MK, x_MC, len(g_MK), g_MK.shape[1], x_MC.shape[1]):
        return summed_rows(g_MK, x_MC)
    return g_MK.t() @ x_MC


def summed_rows(g_MK: Tensor, x_MC: Tensor) -> Tensor:
    """g.T @ x by oneDNN, of which the left matrix is copied to lie by its rows: the smaller one, with the result's."""
    (m, k), c = g_MK.shape, x_MC.shape[1]
    if k * m > c * m + k * c:
        return product(x_MC.t().contiguous(), g_MK.t()).t().contiguous()
    return product(g_MK.t().contiguous(), x_MC.t())


def _fit(what: Pass, a: Tensor, b: Tensor, m: int, k: int, c: int) -> bool:
    return a.dtype == b.dtype == torch.float32 and a.device.type == "cpu" and are_faster(what, m, k, c) and in_full()
