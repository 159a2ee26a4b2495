"""Writes in place to tensors on shards, through whatever shares their memory, and calls
that PyTorch refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hetconv
from hetconv.runtime.het_tensor import HetTensor
from tests.placed import PLACEMENTS, SHAPE, placed
from tests.spawn import on_ranks

# Each returns a tensor itself or a view of it where nothing is to be done, and a copy
# where something is.
ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda h: h.contiguous(),
    "contiguous, as images": lambda h: h.contiguous(memory_format=torch.channels_last),
    "to the same dtype": lambda h: h.to(h.dtype),
    "to another dtype": lambda h: h.to(torch.float32),
    "to a copy": lambda h: h.to(h.dtype, copy=True),
    "double": lambda h: h.double(),
    "type_as": lambda h: h.type_as(h),
    "dropout of nothing": lambda h: F.dropout(h, 0.0),
    "dropout in evaluation": lambda h: F.dropout(h, 0.5, training=False),
    "detach": lambda h: h.detach(),
    "expand to its own shape": lambda h: h.expand(h.shape),
    "reshape to its own shape": lambda h: h.reshape(h.shape),
    "reshape": lambda h: h.reshape(4, 8, 30),
    "flatten of a transpose": lambda h: h.transpose(1, 2).flatten(2),
    "view": lambda h: h.view(4, 8, 30),
    "transpose": lambda h: h.transpose(1, 3),
    "transpose, contiguous": lambda h: h.transpose(1, 2).contiguous(),
    "chunk": lambda h: h.chunk(2, 1)[1],
    "index": lambda h: h[1:, ::2],
    "unsqueeze": lambda h: h.unsqueeze(1),
    "squeeze": lambda h: h[:, :1].squeeze(1),
    "narrow": lambda h: h.narrow(2, 1, 3),
    "unfold": lambda h: h.unfold(2, 2, 2),
    "diagonal": lambda h: h.diagonal(dim1=2, dim2=3),
    "clone": lambda h: h.clone(),
    "alias of an alias": lambda h: h.contiguous().to(h.dtype).detach()[1:],
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "relu_": lambda y: y.relu_(),
    "add_": lambda y: y.add_(2),
    "mul_ of a part": lambda y: y[:2].mul_(3),
    "zero_": lambda y: y.zero_(),
}
RESHAPED: dict[str, Callable[[Tensor], Any]] = {
    "squeeze_": lambda h: h.unsqueeze(0).clone().squeeze_(0),
    "squeeze_ of nothing": lambda h: h.squeeze_(),
    "unsqueeze_": lambda h: h.unsqueeze_(1),
    "transpose_": lambda h: h.transpose_(1, 2),
    "swapaxes_": lambda h: h.swapaxes_(0, 3),
    "t_": lambda h: h[0, 0].clone().t_(),
    "resize_": lambda h: h.resize_(4, 8, 3, 5),
    "resize_as_": lambda h: h.resize_as_(h[:, :4].clone()),
    "tensor_split with an empty piece": lambda h: torch.cat(
        h.tensor_split((1, 1, 4), 1)[1:], 1
    ),
    "split with an empty piece": lambda h: sum(
        piece.sum() for piece in h.split((0, 3, 0, 5), 1)
    ),
    "an empty slice": lambda h: h[:, 3:3].relu(),
    "cat with an empty one": lambda h: torch.cat([h[:, :0], h], 1),
    "pixel_shuffle of nothing": lambda h: F.pixel_shuffle(h[:, :0], 2),
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a pool over a depth of 1": lambda h: F.max_pool3d(h[:, :, :1].unsqueeze(0), 2),
    "a sum that does not fit in place": lambda h: h[:1, :1, :, :1].add_(h),
    "a product of shapes that do not fit": lambda h: h * h[:, :3],
    "a view that does not fit": lambda h: h.view(7, -1),
    "a view of what is not contiguous": lambda h: h.transpose(1, 2).view(4, 48, 5),
    "a matrix product": lambda h: h @ h,
    "a dimension that is not there": lambda h: h.sum(4),
    "a slice in a place that is not there": lambda h: h.select(1, 8),
    "a cat of shapes that do not fit": lambda h: torch.cat([h, h[:, :, :3]], 1),
    "groups that do not divide": lambda h: F.group_norm(h, 3),
    "a reflection wider than the image": lambda h: F.pad(
        h, (5, 5, 0, 0), mode="reflect"
    ),
    "an activation of integers": lambda h: F.softmax(h.long(), 1),
    "a write to an expanded one": lambda h: h[:, :1].expand(4, 8, 6, 5).add_(1),
    "a convolution of other channels": lambda h: F.conv2d(
        h, torch.ones(3, 7, 1, 1, dtype=h.dtype)
    ),
    "one of several views": lambda h: h.split(3, 1)[1].mul_(2),
    "one of several views, of one dimension": lambda h: h.unbind(2)[0].relu_(),
}


def whole_value() -> Tensor:
    return torch.arange(960, dtype=torch.float64).reshape(SHAPE) - 500


def run(program: Callable[[Tensor], Any], h: Tensor) -> Any:
    """What a program gives for a tensor that is not a leaf; the error that it raises, as text."""
    try:
        return program(h * 1)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def differences(program: Callable[[Tensor], Any]) -> dict[str, Any]:
    """What a program gives on parts, and on the whole, for each placement for which
    these differ.
    """
    expected, found = run(program, whole_value().requires_grad_()), {}
    for placement, layout in PLACEMENTS.items():
        got = run(program, placed(whole_value(), layout)[0])
        if isinstance(got, HetTensor):
            assert not isinstance(expected, str), (placement, expected)
            assert (
                got.shape == got.size() == tuple(got.size(d) for d in range(got.dim()))
            ), placement
            assert got.numel() == expected.numel(), placement
            got = hetconv.gather(got)
        if isinstance(got, str) or isinstance(expected, str):
            same = isinstance(got, str) and got == expected
        else:
            same = (
                got.shape == expected.shape
                and got.dtype == expected.dtype
                and torch.allclose(got, expected)
            )
        if not same:
            found[placement] = got, expected
    return found


def written_through(alias: str, write: str) -> Callable[[Tensor], Tensor]:
    def program(h: Tensor) -> Tensor:
        y = ALIASES[alias](h)
        WRITES[write](y)
        return torch.cat([h.flatten(), y.flatten().to(h.dtype)])

    return program


def written_before(alias: str, write: str) -> Callable[[Tensor], Tensor]:
    def program(h: Tensor) -> Tensor:
        y = ALIASES[alias](h)
        WRITES[write](h)
        return torch.cat([h.flatten(), y.flatten().to(h.dtype)])

    return program


def of_alias(alias: str) -> dict[str, Any]:
    return {
        f"{write} {'to' if program is written_through else 'under'} it": different
        for write in WRITES
        for program in (written_through, written_before)
        if (different := differences(program(alias, write)))
    }


def of_program(table: str, name: str) -> dict[str, Any]:
    return differences({"reshaped": RESHAPED, "refused": REFUSED}[table][name])


@pytest.mark.parametrize("alias", ALIASES)
def test_a_write_is_seen_by_all_that_share_the_memory(alias: str) -> None:
    assert on_ranks(3, of_alias, alias) == [{}] * 3


@pytest.mark.parametrize("name", RESHAPED)
def test_what_changes_a_shape_or_is_empty(name: str) -> None:
    assert on_ranks(3, of_program, "reshaped", name) == [{}] * 3


@pytest.mark.parametrize("name", REFUSED)
def test_what_pytorch_refuses_is_refused_in_its_own_words(name: str) -> None:
    assert isinstance(run(REFUSED[name], whole_value().requires_grad_()), str)
    assert on_ranks(3, of_program, "refused", name) == [{}] * 3


OUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "unbind_copy": lambda h, out: torch.unbind_copy(h, 2, out=list(out.unbind(2))),
    "gather": lambda h, out: torch.gather(
        h, 1, torch.zeros(SHAPE, dtype=torch.int64), out=out
    ),
    "index_select": lambda h, out: torch.index_select(
        h, 1, torch.arange(8).flip(0), out=out
    ),
    "add": lambda h, out: torch.add(h, h, out=out),
}


def of_out(name: str, wrong: bool) -> dict[str, Any]:
    def program(h: Tensor) -> Tensor:
        with torch.no_grad():
            out = torch.zeros(
                SHAPE, dtype=torch.float32 if wrong and name == "gather" else h.dtype
            )
            OUTS[name](h, out)
        return out

    return differences(program)


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("name", OUTS)
def test_out(name: str, wrong: bool) -> None:
    assert on_ranks(3, of_out, name, wrong) == [{}] * 3
