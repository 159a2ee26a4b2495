"""`bench norms`: its contenders compute the same, and it runs on a GPU alone."""

from __future__ import annotations

import argparse

import pytest
import torch

from bench.kernels.checks import error
from bench.norms import suite
from bench.norms.suite import LIMITS, MEMORIES, WORKS, Case, Work
from hetconv import kernels
from hetconv.errors import KernelError

CPU = torch.device("cpu")


@pytest.mark.parametrize("groups", [4, None])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("work", WORKS)
def test_both_contenders_compute_the_norm(
    work: Work, memory: str, groups: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a spoilt number of either would be noticed."""
    monkeypatch.setitem(suite.IMAGES, "small", (2, 8, 6))
    kernels.set_backend("triton")
    case = Case("small", groups, memory, "fp32")
    t = suite.drawn(case, CPU)
    expected = suite.exact(work, case, t)
    for contender in (suite.by_triton, suite.by_torch):
        found = contender(work, case, t)
        assert error(found, expected).within(LIMITS["fp32"])
        found[-1, -1, -1, -1] += 1
        assert not error(found, expected).within(LIMITS["fp32"])


def test_cases_differ_in_their_names() -> None:
    found = suite.cases()
    assert len({case.name for case in found}) == len(found) == 36


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    parser = argparse.ArgumentParser()
    suite.add_arguments(parser)
    with pytest.raises(KernelError, match="bench norms needs a CUDA device"):
        suite.run(parser.parse_args([]))
