"""Half precision and memory formats, where other systems raise and torch's own CPU
convolution may be wrong.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hetconv.nn.layers import HetConv2d
from hetconv.sharding.split import Split
from tests.equivalence import full_gradients
from tests.spawn import on_ranks


def in_dtype(
    dtype: torch.dtype, kind: str, channels_last: bool
) -> tuple[float, torch.dtype, torch.dtype]:
    """The error against float32, relative to the largest value, of output and gradients
    together.
    """
    truth = nn.Conv2d(8, 8, 3, padding=1)
    low = copy.deepcopy(truth).to(dtype)
    truth.load_state_dict({k: v.float() for k, v in low.state_dict().items()})
    x = torch.randn(2, 8, 9, 8).to(dtype)
    if channels_last:
        low, x = (
            low.to(memory_format=torch.channels_last),
            x.to(memory_format=torch.channels_last),
        )
    cut = HetConv2d.from_conv(low, Split(kind, (6, 2)))  # type: ignore[arg-type]
    x_low, x_true = x.clone().requires_grad_(), x.float().requires_grad_()
    y, expected = cut(x_low), truth(x_true)
    g = torch.randn(8, 9, 8, 2).to(dtype).permute(3, 0, 1, 2)
    y.backward(g)
    expected.backward(g.float())
    pairs = [(y, expected), (x_low.grad, x_true.grad)]
    pairs += [(full_gradients(cut)[k], p.grad) for k, p in truth.named_parameters()]
    error = max(
        float((a.detach().float() - b.detach()).abs().max() / b.detach().abs().max())
        for a, b in pairs
    )
    return error, y.dtype, x_low.grad.dtype


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", ["height", "width", "filter", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_half_precision_and_memory_formats(
    dtype: torch.dtype, kind: str, channels_last: bool
) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for error, *dtypes in on_ranks(2, in_dtype, dtype, kind, channels_last):
        assert error <= tolerance
        assert dtypes == [dtype, dtype]


def one_column(
    dtype: torch.dtype, width: int, kernel: int, stride: int
) -> tuple[float, float]:
    """Errors of output and filter gradient where the output has one column, relative to
    the largest value.
    """
    truth = nn.Conv2d(8, 8, kernel, stride, 1)
    low = copy.deepcopy(truth).to(dtype)
    truth.load_state_dict({k: v.float() for k, v in low.state_dict().items()})
    cut = HetConv2d.from_conv(low, Split("height", (2, 1)))
    x = torch.randn(3, 8, 10, width).to(dtype)
    y, expected = cut(x), truth(x.float())
    g = torch.randn(expected.shape).to(dtype)
    y.backward(g)
    expected.backward(g.float())
    pairs = [(y.detach(), expected.detach()), (cut.weight.grad, truth.weight.grad)]
    first, second = (
        float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs
    )
    return first, second


@pytest.mark.parametrize(
    ("width", "kernel", "stride"), [(1, 3, 2), (1, 3, 1), (2, 3, 2), (6, 7, 2)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_of_one_output_column(
    dtype: torch.dtype, width: int, kernel: int, stride: int
) -> None:
    """torch's own CPU convolution is wrong here."""
    for errors in on_ranks(2, one_column, dtype, width, kernel, stride):
        assert max(errors) <= {torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
