"""Predicted and measured steps, side by side."""

from __future__ import annotations

import pytest
import torch

import hetconv
from bench.shared.prediction_errors import (
    Check,
    LayerErrors,
    layer_errors,
    plan_steps,
    predicted_and_measured,
)
from hetconv.autotune.measure.paired_rounds import paired_rounds
from hetconv.autotune.models.inputs import ModelInputs
from hetconv.cost.estimator import estimate
from hetconv.planner.candidates import Candidates
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE, Mode
from tests.nets import Chain
from tests.spawn import on_ranks


def test_figures_are_of_errors_and_of_the_order() -> None:
    steps = {str(i): (float(i), float(i)) for i in range(1, 10)} | {"off": (12.0, 10.0)}
    found = Check(steps)
    assert found.errors == [0.0] * 9 + [pytest.approx(0.2)]
    assert found.figures == pytest.approx(
        {"median error": 0.0, "p90 error": 0.02, "tau": 1.0}
    )
    turned = Check({"a": (1.0, 4.0), "b": (2.0, 1.0)})
    assert turned.figures == pytest.approx(
        {"median error": (0.75 + 1.0) / 2, "p90 error": 0.975, "tau": -1.0}
    )


def test_the_spread_of_rounds_is_what_noise_makes_of_a_plan() -> None:
    steps = {"a": (1.0, 1.0), "b": (2.0, 2.0)}
    spread = Check(steps, {"a": [0.9, 1.0, 1.3], "b": [1.0, 2.0, 2.4]}).figures[
        "spread of rounds"
    ]
    assert spread == pytest.approx((0.1 + 0.2) / 2)
    assert "spread of rounds" not in Check(steps).figures


def test_noise_alone_leaves_the_order_of_rounds_in_doubt() -> None:
    steps = {"a": (1.0, 1.0), "b": (2.0, 2.0), "c": (3.0, 3.0)}
    same, turned = (
        {n: [s] * 4 for n, (_, s) in steps.items()},
        {"a": [1.0, 3.0], "b": [2.0, 2.0], "c": [3.0, 1.0]},
    )
    assert Check(steps, same).figures["tau of rounds"] == pytest.approx(1.0)
    assert Check(steps, turned).figures["tau of rounds"] == pytest.approx(-1.0)
    assert (
        "tau of rounds"
        not in Check(steps, {n: [s] for n, (_, s) in steps.items()}).figures
    )


def errors_of_layers(mode: Mode) -> LayerErrors:
    graph = hetconv.capture(Chain(), torch.randn(2, 4, 16, 16))
    return layer_errors(
        graph, ClusterProfile.from_devices(["cpu", "cpu"]), mode, torch.device("cpu")
    )


@pytest.mark.parametrize(("mode", "passes"), [("infer", 1), ("train", 2)])
def test_layers_are_measured_at_shares_of_their_own(mode: Mode, passes: int) -> None:
    first, second = on_ranks(2, errors_of_layers, mode)
    convs, linears = 3 * (2 + 2), 2 * (1 + 2 + 2)  # of two rows both shares come to one
    assert first == second
    for errors in first:
        assert len(errors) == 2 * (convs + linears) * passes
        assert errors == sorted(errors)
        assert all(error >= 0 for error in errors)


def checked() -> tuple[Check, dict[str, float]]:
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(2, 4, 16, 16)
    graph = hetconv.capture(model, x)
    profile = ClusterProfile.from_devices(["cpu", "cpu"])
    plans = {
        n: s
        for n, s in Candidates(graph, profile, "train").whole_models().items()
        if "channel" not in n
    }
    steps = plan_steps(model, ModelInputs.of(x), graph, profile, "train", plans)
    found = predicted_and_measured(
        paired_rounds(steps, 3, x.device), graph, profile, "train", plans
    )
    predicted = {}
    for name, splits in plans.items():
        prediction, _ = estimate(graph, profile, splits, "train")
        predicted[name] = (
            max(prediction.compute_s)
            if name.startswith(SINGLE_DEVICE)
            else prediction.step_s
        )
    return found, predicted


def test_every_plan_is_predicted_and_runs() -> None:
    first, second = on_ranks(2, checked)
    check, predicted = first
    steps = check.steps
    assert {name: p for name, (p, _) in steps.items()} == predicted
    assert all(seconds > 0 for _, seconds in steps.values())
    assert second[0] == check  # every rank knows when the last one was done
    assert any(name.startswith(SINGLE_DEVICE) for name in steps)
    assert any(not name.startswith(SINGLE_DEVICE) for name in steps)
