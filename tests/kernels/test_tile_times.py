"""Predicted times of tiles against those that GPUs measured."""

from __future__ import annotations

import pytest

from bench.shared.machine import RESULTS
from bench.tiles import fit
from bench.tiles.measured import MeasuredPass, load, summary
from bench.tiles.suite import MEASURED
from hetconv.kernels.chip import CHIPS
from hetconv.kernels.tiles import Pass, default_tile
from hetconv.kernels.tiles.fitted_models import FORWARD, WEIGHT_GRADIENT

H100, PASSES = CHIPS[90], load(MEASURED)
HELD_OUT = load(RESULTS / "nvidia-h200" / "tiles.json")


@pytest.mark.parametrize("what", ["forward", "input gradient", "weight gradient"])
@pytest.mark.parametrize(("passes", "most"), [(PASSES, 1.06), (HELD_OUT, 1.09)])
def test_the_tile_that_is_predicted_fastest_is_fast(
    passes: list[MeasuredPass], most: float, what: Pass
) -> None:
    """On the GPU that the constants are fitted to, and on another one."""
    regrets = fit.Data(passes).regrets(fit.Models(FORWARD, WEIGHT_GRADIENT))
    found = summary(regrets)[what]
    assert found["passes"] >= 5
    assert found["geomean"] <= most
    assert found["worst"] <= 1.3


def test_the_fit_recovers_constants_from_the_times_that_they_predict() -> None:
    """With fewer generations it comes near; with none it would not."""
    few = PASSES[:6]
    truth = fit.Models(FORWARD, WEIGHT_GRADIENT)
    data = fit.Data(few)
    data.seconds = data.predicted(truth)
    started = fit._loss(data, fit.START)
    at_truth = fit._loss(data, _logarithms(truth))
    assert at_truth < 0.2 * started


def _logarithms(models: fit.Models) -> fit.Numbers:
    own = [getattr(models.weight_gradient, n) for n in fit.OF_WEIGHT_GRADIENTS]
    return fit.np.log([*(getattr(models.other, n) for n in fit.NAMES), *own])


def test_the_default_fills_whole_waves() -> None:
    """18 tiles of 128 x 256 on 132 multiprocessors: 7 programs share each, not 6 or 8."""
    (measured,) = (
        p
        for p in PASSES
        if p.what == "weight gradient" and p.name == "vgg16 256-256 3x3 @56 N32 bf16 K"
    )
    (shape,) = measured.shapes
    tile = default_tile(shape, H100)
    programs = shape.tiles(tile) * tile.split_k
    assert programs / H100.sms % 1 > 0.9 or programs % H100.sms == 0
