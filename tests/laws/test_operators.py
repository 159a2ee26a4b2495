"""Every operator of PyTorch's own database gives on tensors in parts what it gives on
plain ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from .operators import names, number_of_cases, run_cases
from .survey import Fault, Subject, survey

DRAWN = 20
"""Operators of each number of ranks, unless all are asked for."""


def subjects(world: int, whole: bool) -> Iterator[Subject]:
    """The operators to run, each with some of its samples."""
    every = range(len(names()))
    most = 6 if whole else 2
    for i in every if whole else random.Random(world).sample(every, DRAWN):
        if cases := number_of_cases(i, world, most):
            yield Subject(names()[i], cases, (i, most))


@pytest.mark.parametrize("world", [2, 3])
def test_operators_give_on_parts_what_they_give_on_the_whole(
    world: int, whole_laws: bool
) -> None:
    faults, right = list[Fault](), 0
    for _, found in survey(world, run_cases, subjects(world, whole_laws)):
        faults += found.faults
        right += found.right
    assert right > 300
    assert not faults, "\n".join(map(str, faults))
