"""The tile that is taken where none was tuned: the fastest as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from hetconv.kernels.chip import Chip

from .fitted_models import FORWARD, WEIGHT_GRADIENT
from .gemm_shape import GemmShape
from .search_space import MIN_STAGES, split_k_candidates, tiles_of_kind, uses_tma
from .tile import Tile, TileKind
from .time_model import (
    Numbers,
    TimeModel,
    predicted_seconds,
    resident_programs,
    workload,
)


@lru_cache(4096)
def default_tile(shape: GemmShape, chip: Chip) -> Tile:
    """Returns the tile, with its split-k, of the fewest estimated seconds.

    Two stages are left to a search: hardly one such tile was measured.
    """
    kind: TileKind = "tma" if uses_tma(shape, chip) else "pointer"
    found = list(tiles_of_kind(shape, chip, kind))
    pipelined = [t for t in found if t.stages > MIN_STAGES]
    return fastest(with_splits(pipelined or found, shape, chip), shape, chip)


def fastest(tiles: Sequence[Tile], shape: GemmShape, chip: Chip) -> Tile:
    """Returns the tile of the fewest estimated seconds."""
    return tiles[int(np.argmin(estimated_seconds(tiles, shape, chip)))]


def with_splits(tiles: Sequence[Tile], shape: GemmShape, chip: Chip) -> list[Tile]:
    """Returns tiles, each with every split-k worth a try."""
    found = []
    for tile in tiles:
        at_once = chip.sms * resident_programs(tile, shape, chip)
        factors = split_k_candidates(tile, shape, at_once)
        found += [replace(tile, split_k=z) for z in factors]
    return found


def estimated_seconds(tiles: Sequence[Tile], shape: GemmShape, chip: Chip) -> Numbers:
    """Returns the predicted seconds of each tile, which rank them.

    Args:
        tiles: Tiles that fit the chip.
        shape: The matrix product.
        chip: The GPU.
    """
    return predicted_seconds(workload(tiles, shape, chip), chip, model_of(shape))


def model_of(shape: GemmShape) -> TimeModel:
    """Returns the fitted constants for a matrix product."""
    return WEIGHT_GRADIENT if shape.reduces_pixels else FORWARD
