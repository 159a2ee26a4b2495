"""Tiles of the implicit GEMM kernels: search space, predicted time, default and tuned tiles."""

from .choice import default_tile, estimated_seconds, fastest, with_splits
from .gemm_shape import GemmShape
from .pixel_boxes import Box, Image, PixelRuns, pixel_box, pixel_runs
from .search_space import (
    COMPOSITE_SHAPES,
    MAX_SPLIT_K,
    MIN_STEPS_PER_SPLIT,
    STEP_BYTES,
    TILE_SHAPES,
    composite_shapes,
    fits,
    largest_stages,
    search_space,
    split_k_candidates,
    tile_depths,
    tile_shapes,
    tiles_of_kind,
    uses_tma,
)
from .tile import Pass, Tile, TileKind
from .tuned import Entry, Problem, any_installed, install, tuned_entry, versions_in_use

__all__ = [
    "COMPOSITE_SHAPES",
    "MAX_SPLIT_K",
    "MIN_STEPS_PER_SPLIT",
    "STEP_BYTES",
    "TILE_SHAPES",
    "Box",
    "Entry",
    "GemmShape",
    "Image",
    "Pass",
    "PixelRuns",
    "Problem",
    "Tile",
    "TileKind",
    "any_installed",
    "composite_shapes",
    "default_tile",
    "estimated_seconds",
    "fastest",
    "fits",
    "install",
    "largest_stages",
    "pixel_box",
    "pixel_runs",
    "search_space",
    "split_k_candidates",
    "tile_depths",
    "tile_shapes",
    "tiles_of_kind",
    "tuned_entry",
    "uses_tma",
    "versions_in_use",
    "with_splits",
]
