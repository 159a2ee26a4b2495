"""Tiles that are compiled and checked by many processes before one times them alone."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from bench.shared.timing import short
from hetconv.kernels.tiles import Pass, Tile

from .cases import Case
from .checks import Tensors, by_aten, by_triton, drawn, errors, is_wrong

REPEATS = 3  # calls on the same inputs, whose bits must not differ
WORKERS = 15  # each has a context on the GPU of half a gigabyte

Problem = tuple[Case, Pass, Tile | None]  # the last: None for the default tile
Check = Callable[[Sequence[Problem]], list[str | None]]


@contextmanager
def checks_in_processes() -> Iterator[Check]:
    """Returns what tells the `fault` of each problem, by many processes at a time.

    What they compile stays in Triton's cache on disk, where this process finds it.
    """
    workers = max(min(WORKERS, (os.cpu_count() or 1) - 1), 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield lambda problems: list(pool.map(fault, problems))


def fault(problem: Problem) -> str | None:
    """Returns what is wrong with a tile on this process's GPU, or None.

    Args:
        problem: The convolution, the pass and the tile.
    """
    case, what, tile = problem
    try:
        tensors, other = _inputs(case, what)
        found = errors(case, what, tensors, other, tile)
        if is_wrong(case, found):
            return f"wrong: {found}"
        first = by_triton(case, what, tensors, tile)
        again = (by_triton(case, what, tensors, tile) for _ in range(REPEATS - 1))
        if not all(first.equal(y) for y in again):
            return "unstable: results differ from call to call"
    except Exception as e:
        return short(e)
    return None


@lru_cache(1)
def _inputs(case: Case, what: Pass) -> tuple[Tensors, Tensor]:
    device = torch.device("cuda", 0)
    tensors = drawn(case, what, device)
    return tensors, by_aten(case, what, tensors)
