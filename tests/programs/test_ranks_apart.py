"""Ranks that go different ways: each raises an error that names the calls of both, and where they are made."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetconv
from hetconv.rules import Split, SplitKind

from ..nets import plan_of
from ..spawn import outcomes


class Branches(nn.Module):
    """Two blocks of the same shapes, of which one is taken, and one that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.dropped, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor, path: str = "left", drop: bool = False) -> Tensor:
        y = torch.relu(self.stem(x))
        y = torch.relu(self.left(y) if path == "left" else self.right(y))
        if not drop:
            y = torch.relu(self.dropped(y))
        out: Tensor = self.head(y)
        return out


Program = Callable[[nn.Module, Tensor, int], None]


def single_path(model: nn.Module, x: Tensor, rank: int) -> None:
    model(x, random.Random(rank).choice(["left", "right"]))


def layer_drop(model: nn.Module, x: Tensor, rank: int) -> None:
    model(x, drop=random.Random(rank).random() < 0.5)


def validation_on_one_rank(model: nn.Module, x: Tensor, rank: int) -> None:
    if rank == 0:
        with torch.no_grad():
            model(x)
    model(x).sum().backward()


def forward_again_on_one_rank(model: nn.Module, x: Tensor, rank: int) -> None:
    loss = model(x).sum()
    if rank == 0:
        loss = loss + model(x).sum()
    loss.backward()


def loss_fails_on_one_rank(model: nn.Module, x: Tensor, rank: int) -> None:
    for _ in range(2):
        try:
            if rank == 0:
                loss = model(x).view(7, 7)
            else:
                loss = model(x).sum()
        except RuntimeError:  # of a shape that does not fit
            continue
        loss.backward()


def backward_on_one_rank(model: nn.Module, x: Tensor, rank: int) -> None:
    loss = model(x).sum()
    if rank == 0:
        loss.backward()
    else:
        hetconv.full_state_dict(model)


# What each must say: the calls of both ranks, and a word of the line that each is at.
PROGRAMS: dict[Program, tuple[str, ...]] = {
    single_path: ("layer 'left'", "layer 'right'", "in forward"),
    layer_drop: ("layer 'dropped'", "in forward"),
    validation_on_one_rank: ("gradients False", "gradients True", "in validation_on_one_rank"),
    forward_again_on_one_rank: ("forward", "the backward pass of", "in forward_again_on_one_rank"),
    loss_fails_on_one_rank: ("forward", "the backward pass of", "in loss_fails_on_one_rank"),
    backward_on_one_rank: ("full_state_dict", "the backward pass of", "in backward_on_one_rank"),
}


def said(kind: SplitKind, sizes: tuple[int, ...]) -> dict[str, str]:
    """What each program's error says, each in a process group of its own."""
    return {program.__name__: said_by(program, kind, sizes) for program in PROGRAMS}


def said_by(program: Program, kind: SplitKind, sizes: tuple[int, ...]) -> str:
    torch.manual_seed(0)
    model = Branches()
    splits = {name: Split(kind, sizes) for name, _ in model.named_children()}
    if kind == "channel":
        del splits["stem"]  # of three channels
    if kind == "filter":
        del splits["head"]
    cut = hetconv.parallelize(model, plan_of(model, splits, len(sizes)), group=dist.new_group())
    try:
        program(cut, torch.randn(2, 3, 8, 8), min(dist.get_rank(), 1))
    except hetconv.DisagreementError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "sizes"), [("height", (5, 3)), ("filter", (5, 3)), ("channel", (5, 3)), ("height", (4, 2, 2))]
)
def test_all_ranks_say_what_each_of_them_does(kind: SplitKind, sizes: tuple[int, ...]) -> None:
    for ok, of_programs in outcomes(len(sizes), said, kind, sizes):
        assert ok, of_programs
        for program, expected in PROGRAMS.items():
            text = of_programs[program.__name__]
            assert all(words in text for words in expected), text
            assert text.count("test_ranks_apart.py:") >= 2, text
