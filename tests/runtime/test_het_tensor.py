"""HetTensor: how it looks from outside, what stays on parts, and what happens to the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import hetconv
from hetconv.comm.rank_group import count_sent, rank_group_of
from hetconv.errors import HetConvError, LayoutError
from hetconv.operators.base import N_ARY
from hetconv.operators.elementwise import UNARY
from hetconv.runtime.het_tensor import HetTensor
from hetconv.sharding.layout import Layout
from tests.operators.test_functions_on_shards import FUNCTIONS
from tests.placed import PLACEMENTS, SHAPE, WORLD, placed
from tests.spawn import on_ranks

WHOLE = torch.arange(float(torch.Size(SHAPE).numel())).reshape(SHAPE)


def rows(name: str = "rows") -> HetTensor:
    x, local = placed(WHOLE, PLACEMENTS[name])
    return HetTensor.wrap(local.detach(), x.placement, x.group)


def questions() -> list[Any]:
    """Asked on one rank alone, so that an answer that needs the others would never come."""
    rank_group_of()  # whose first call on a group is collective
    if dist.get_rank() != 1:
        return []
    x = rows()
    asked = [
        tuple(x.shape),
        tuple(x.size()),
        x.size(1),
        x.dim(),
        x.ndim,
        x.numel(),
        len(x),
        x.dtype,
        str(x.device),
    ]
    asked += [
        x.is_floating_point(),
        x.requires_grad,
        x.is_leaf,
        x.grad_fn,
        x.element_size(),
        x.is_cuda,
    ]
    return [*asked, x.get_device(), repr(x)]


def test_questions_of_shape_and_type_need_no_other_rank() -> None:
    shape = (4, 8, 6, 5)
    answers = [
        shape,
        shape,
        8,
        4,
        4,
        960,
        4,
        torch.float32,
        "cpu",
        True,
        False,
        True,
        None,
        4,
        False,
        -1,
    ]
    assert on_ranks(WORLD, questions)[1] == [
        *answers,
        f"HetTensor(shape={shape}, sharded, local=(4, 8, 2, 5))",
    ]


def kept_on_parts(names: list[str]) -> list[str]:
    """Those whose result, of a tensor cut by rows, was a plain tensor."""
    x, z = rows() + 1, rows("columns") + 1
    shapes = {"c11": (8, 1, 1), "one": (), "w": (5,), "hw": (6, 5)}
    p = {"full": WHOLE} | {name: torch.ones(shape) for name, shape in shapes.items()}
    return [
        name for name in names if not isinstance(FUNCTIONS[name](x, z, p), HetTensor)
    ]


def test_operators_with_a_rule_stay_on_parts() -> None:
    names = [
        "relu",
        "gelu",
        "sigmoid",
        "add",
        "mul",
        "x + number",
        "number / x",
        "2 ** x",
        "x * c11",
        "c11 * x",
        "full - x",
        "x * tensor of one number",
        "where number",
        "max_pool2d 3, 2, 1",
        "relu_",
        "+=",
        "dropout",
        "avg_pool2d without padding counted",
        "adaptive_avg_pool2d 1",
        "pixel_shuffle",
        "flatten first",
        "cat channels",
        "to the type of parts",
        "zeros_like",
        "type_as",
        "masked",
        *sorted(UNARY | N_ARY),
    ]
    assert on_ranks(WORLD, kept_on_parts, names) == [[]] * WORLD


def bytes_sent(name: str) -> int:
    x = rows()
    with count_sent() as sent:
        FUNCTIONS[name](x, x, {"c11": torch.ones(8, 1, 1)})
    return sum(sent.values())


@pytest.mark.parametrize(
    "name", ["relu", "add", "x * c11", "cat samples", "pixel_shuffle", "dropout"]
)
def test_what_is_cut_alike_moves_nothing(name: str) -> None:
    assert on_ranks(WORLD, bytes_sent, name) == [0] * WORLD


def gathered(name: str) -> tuple[Tensor, bool, bool]:
    x = rows(name)
    y = hetconv.gather(x)
    return y, type(y) is Tensor, y.is_contiguous()


@pytest.mark.parametrize("name", PLACEMENTS)
def test_gather_gives_the_whole_on_every_rank(name: str) -> None:
    for y, plain, contiguous in on_ranks(WORLD, gathered, name):
        torch.testing.assert_close(y, WHOLE)
        assert plain
        assert contiguous


def gathered_and_written_to() -> Tensor:
    x = rows("rows on one rank")
    hetconv.gather(x).zero_()
    return hetconv.gather(x)


def test_writing_to_what_was_gathered_leaves_the_parts() -> None:
    assert all(torch.equal(y, WHOLE) for y in on_ranks(WORLD, gathered_and_written_to))


def test_a_plain_tensor_is_gathered_already() -> None:
    x = torch.ones(3)
    assert hetconv.gather(x) is x


def fallbacks() -> list[str]:
    """The types of what operators without a rule return."""
    x = rows()
    made = [
        x.cumsum(2),
        x[[0]],
        x.sort(2)[0],
        torch.roll(x, 1, 2),
        x.kthvalue(1, 1)[0],
        F.unfold(x, 2),
    ]
    return [type(y).__name__ for y in made]


def test_operators_without_a_rule_give_plain_tensors() -> None:
    assert on_ranks(WORLD, fallbacks) == [["Tensor"] * 6] * WORLD


def identities() -> list[bool]:
    x = rows()
    before = x
    x += 1
    y = torch.relu_(x)
    z = F.relu(x, inplace=True)
    return [
        x is before,
        y is x,
        z is x,
        isinstance(x, HetTensor),
        x.placement.kind == "sharded",
    ]


def test_a_call_in_place_gives_back_its_tensor() -> None:
    assert on_ranks(WORLD, identities) == [[True] * 5] * WORLD


def shared_views(name: str) -> list[bool]:
    """A view and its base see each other's changes."""
    x = rows(name)
    view = x[:, :2]
    view.fill_(-1.0)
    seen = bool((hetconv.gather(x)[:, :2] == -1).all())
    x.mul_(2)
    return [seen, bool((view == -2).all())]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_view_of_a_gathered_tensor_stays_one(name: str) -> None:
    assert on_ranks(WORLD, shared_views, name) == [[True, True]] * WORLD


def loops() -> tuple[float, list[float], bool]:
    x = rows()
    return float(x.sum()), [float(y.mean()) for y in x], bool((x >= 0).all())


def test_python_sees_the_whole() -> None:
    expected = float(WHOLE.sum()), [float(y.mean()) for y in WHOLE], True
    assert on_ranks(WORLD, loops) == [expected] * WORLD


def backward_of_parts() -> Tensor:
    x, local = placed(WHOLE.double(), PLACEMENTS["rows"])
    (x * x).sum().backward()
    assert local.grad is not None
    return local.grad - 2 * local.detach()


def test_a_loss_that_every_rank_computes_counts_once() -> None:
    assert all(float(g.abs().max()) == 0 for g in on_ranks(WORLD, backward_of_parts))


def below_the_functions() -> str:
    try:
        with torch._C.DisableTorchFunctionSubclass():
            torch.relu(rows())
    except HetConvError as e:
        return str(e)
    return ""


def test_what_cannot_see_the_parts_is_refused() -> None:
    assert all(
        "hetconv.gather" in said for said in on_ranks(WORLD, below_the_functions)
    )


def hooked(how: str) -> str:
    try:
        getattr(rows().requires_grad_(), how)(
            *([print] if how == "register_hook" else [])
        )
    except HetConvError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("how", ["register_hook", "retain_grad"])
def test_what_asks_for_the_gradient_of_parts_is_refused(how: str) -> None:
    """Done to what was gathered, it would never be called."""
    assert all(
        how in said and "hetconv.gather" in said
        for said in on_ranks(WORLD, hooked, how)
    )


def wrong_part() -> str:
    try:
        HetTensor.wrap(
            torch.zeros(2, 2), Layout.sharded((4, 2), 0, (3, 1)), rank_group_of()
        )
    except LayoutError as e:
        return str(e)
    return ""


def test_a_part_of_another_shape_is_refused() -> None:
    first, second = on_ranks(2, wrong_part)
    assert "rank 0's box of the layout has (3, 2)" in first
    assert "rank 1's box of the layout has (1, 2)" in second
