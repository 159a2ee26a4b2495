"""The truth that the kernels are held against: convolution as its definition, in plain
PyTorch, differentiable.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[int, int]


def conv2d(
    x_NCHW: Tensor,
    w_KCRS: Tensor,
    bias_K: Tensor | None = None,
    stride: Pair = (1, 1),
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0)),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> Tensor:
    """y (N, K, P, Q) in the dtype of x, float64 for the truth; ``padding`` is ((top,
    bottom), (left, right)).
    """
    x = F.pad(x_NCHW, (*padding[1], *padding[0]))
    (N, C, H, W), (K, _, R, S) = x.shape, w_KCRS.shape
    P, Q = (
        (i - d * (k - 1) - 1) // s + 1
        for i, k, s, d in zip((H, W), (R, S), stride, dilation, strict=True)
    )
    P, Q = max(P, 0), max(Q, 0)
    y = x.new_zeros(N, groups, K // groups, P, Q)
    for r in range(R):
        for s in range(S):
            rows = slice(
                r * dilation[0], r * dilation[0] + (P - 1) * stride[0] + 1, stride[0]
            )
            cols = slice(
                s * dilation[1], s * dilation[1] + (Q - 1) * stride[1] + 1, stride[1]
            )
            seen = x[:, :, rows, cols] if P and Q else x.new_zeros(N, C, P, Q)
            tap = w_KCRS[:, :, r, s].reshape(groups, K // groups, C // groups)
            y = y + torch.einsum(
                "ngcpq,gkc->ngkpq", seen.reshape(N, groups, C // groups, P, Q), tap
            )
    y = y.reshape(N, K, P, Q)
    return y if bias_K is None else y + bias_K.view(-1, 1, 1)
