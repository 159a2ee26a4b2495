"""Every module of PyTorch's own database between two layers that are cut gives what it
gives on one device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from .modules import names, number_of_cases, run_cases
from .survey import Fault, Subject, survey

DRAWN = 20
"""Modules, unless all are asked for."""
SKIPPED = {"nn.Embedding": "takes indices"}
"""Of which no sample has a tensor that a layer before it can compute, and why."""


@pytest.fixture(autouse=True)
def _samples_in_double() -> None:
    torch.set_default_dtype(torch.float64)


def subjects(whole: bool) -> Iterator[Subject]:
    """The modules to run, each with some of its samples."""
    every = [i for i, name in enumerate(names()) if name not in SKIPPED]
    most = 1000 if whole else 1
    for i in every if whole else random.Random(0).sample(every, DRAWN):
        yield Subject(names()[i], number_of_cases(i, most), (i, most))


def test_what_is_skipped_takes_nothing_that_a_layer_computes() -> None:
    assert {
        name: number_of_cases(names().index(name), 1) for name in SKIPPED
    } == dict.fromkeys(SKIPPED, 0)


def test_modules_between_cut_layers_give_what_they_give_on_one_device(
    whole_laws: bool,
) -> None:
    faults, right = list[Fault](), 0
    for subject, found in survey(2, run_cases, subjects(whole_laws)):
        assert subject.cases, (
            f"{subject.name} takes no float tensor; list it in SKIPPED with the reason"
        )
        faults += found.faults
        right += found.right
    assert right >= 8 * DRAWN
    assert not faults, "\n".join(map(str, faults))
