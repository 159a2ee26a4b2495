"""Study of tiles on a GPU: those that are predicted fastest, checked, then timed beside cuDNN.

Checks compile, so that they run in many processes; timing has the GPU alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.kernels.cases import Case, matching, quick
from bench.kernels.checks import (
    Tensors,
    by_aten,
    by_triton,
    drawn,
    gemm_shapes,
    read_bytes,
    tiles_of,
)
from bench.shared.timing import prepared, sets_for, short
from hetconv.kernels.chip import Chip
from hetconv.kernels.tiles import Pass, Tile, default_tile, estimated_seconds

TILES_PER_PASS = 32
TILES_PER_SHAPE = 3  # of the same sides and warps, which differ in stages and splits
TIMED_ROUNDS = 2  # of which the least counts


def candidates(case: Case, what: Pass, chip: Chip) -> list[Tile]:
    """Returns the tiles of a pass that are studied: the default one, then the fastest.

    They are those that are predicted fastest.

    Args:
        case: The convolution.
        what: The pass.
        chip: The GPU.
    """
    shapes = gemm_shapes(case, what)
    tiles = tiles_of(case, what, chip)
    by_shape = [estimated_seconds(tiles, shape, chip) for shape in shapes]
    found, taken = [default_tile(shapes[0], chip)], Counter[tuple[int, ...]]()
    for i in np.argsort(np.sum(by_shape, axis=0)):
        tile = tiles[i]
        shape = (tile.m, tile.n, tile.k, tile.warps)
        taken[shape] += 1
        if taken[shape] <= TILES_PER_SHAPE and tile != found[0]:
            found.append(tile)
    return found[:TILES_PER_PASS]


def studied(regex: str = "") -> list[tuple[Case, Pass]]:
    """Returns the passes of the suite, those that decide most first.

    Args:
        regex: Regular expression that the names of cases match somewhere.

    Raises:
        KernelError: It matches none, or is no regular expression.
    """
    return [(case, p) for case in matching(quick(), regex) for p in case.passes]


def row(
    case: Case,
    what: Pass,
    tiles: Sequence[Tile],
    wrong: Sequence[str | None],
    device: torch.device,
    l2_bytes: int,
) -> dict[str, Any]:
    """Times tiles of a pass beside cuDNN.

    Args:
        case: The convolution.
        what: The pass.
        tiles: The tiles.
        wrong: What is wrong with each, or None.
        device: The GPU.
        l2_bytes: Bytes of its level-2 cache, which inputs must exceed.

    Returns:
        The row of the result file.
    """
    first = drawn(case, what, device)
    count = sets_for(read_bytes(case, what), l2_bytes)
    sets = [first, *(drawn(case, what, device, first) for _ in range(count - 1))]
    found = {
        str(tile): _timed(case, what, tile, sets) if fault is None else {"wrong": fault}
        for tile, fault in zip(tiles, wrong, strict=True)
    }
    cudnn = _least(lambda i: by_aten(case, what, sets[i]), len(sets))
    return {
        "name": case.name,
        "pass": what,
        "cudnn_us": round(cudnn * 1e6, 2),
        "tiles": found,
    }


def _timed(
    case: Case, what: Pass, tile: Tile, sets: Sequence[Tensors]
) -> dict[str, Any]:
    try:
        seconds = _least(lambda i: by_triton(case, what, sets[i], tile), len(sets))
    except Exception as e:  # one tile must not take the others with it
        return {"failed": short(e)}
    return {"us": round(seconds * 1e6, 2)}


def _least(call: Callable[[int], Tensor], sets: int) -> float:
    timed = prepared(call, sets, 1e-5)
    return min(timed.once() for _ in range(TIMED_ROUNDS))
