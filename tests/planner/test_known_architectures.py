"""Plans of known architectures.

They are never worse than what they are compared with, and the same in every process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from torch import nn

import hetconv
from bench.planner import EVEN, SAMPLE, modelled
from bench.shared.models import captured, unet
from hetconv.schemas.plan import Plan
from hetconv.tracing.graph import Graph

BATCH = {"AlexNet": 64, "ResNet-50": 64, "U-Net": 16}


@cache
def graph_of(name: str) -> Graph:
    return captured(name, BATCH.get(name, 64))


@cache
def planned(name: str, devices: int) -> Plan:
    return hetconv.make_plan(graph_of(name), modelled(devices))


def gain(plan: Plan, over: str) -> float:
    assert plan.predicted is not None
    assert plan.alternatives is not None
    return plan.alternatives[over] / plan.predicted.step_s


def test_meta_tensors_give_the_graph_that_others_give() -> None:
    import torch

    model: nn.Module = unet(width=4)
    with torch.device("meta"):
        on_meta = hetconv.capture(unet(width=4), torch.empty(2, 3, 16, 16))
    assert on_meta == hetconv.capture(model, torch.empty(2, 3, 16, 16))


def test_uneven_plans_gain_on_sample_splits_and_on_even_plans() -> None:
    """On the model profile: devices of 10, 5, 5 and 2 TFLOPS that share a wire of 10
    GB/s, a batch of 64.
    """
    residual, fully_connected = planned("ResNet-50", 4), planned("AlexNet", 4)
    assert gain(residual, SAMPLE) >= 1.15
    assert gain(fully_connected, SAMPLE) >= 2.0
    assert gain(residual, EVEN) >= 1.2
    assert gain(fully_connected, EVEN) >= 1.2


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("AlexNet", 4),
        ("ResNet-50", 4),
        ("U-Net", 4),
        pytest.param("InceptionV3", 8, marks=pytest.mark.slow),
        pytest.param("DenseNet-121", 4, marks=pytest.mark.slow),
    ],
)
def test_no_plan_is_predicted_to_be_worse_than_what_it_is_compared_with(
    name: str, devices: int
) -> None:
    plan = planned(name, devices)
    assert plan.predicted is not None
    assert plan.alternatives is not None
    assert plan.predicted.step_s <= min(plan.alternatives.values()) * (1 + 1e-12)
    assert plan.predicted.step_s <= plan.predicted.operator_sum_s * 1.01
    assert {
        "planned",
        EVEN,
        SAMPLE,
        "uneven filter split",
        "fastest device alone",
    } <= plan.alternatives.keys()


SAVE = """
import sys, hetconv
from bench.planner import modelled
from bench.shared.models import captured
hetconv.make_plan(captured("U-Net", 16), modelled(4)).save(sys.argv[1])
"""


def test_the_same_input_gives_the_same_plan_in_any_process(tmp_path: Path) -> None:
    plan = planned("U-Net", 4)
    plan.save(tmp_path / "own.json")
    path, seed = (
        tmp_path / "its.json",
        str(int(os.environ.get("PYTHONHASHSEED", "0").replace("random", "0")) + 1),
    )
    subprocess.run(
        [sys.executable, "-c", SAVE, path],
        check=True,
        env=os.environ | {"PYTHONHASHSEED": seed},
    )
    assert path.read_bytes() == (tmp_path / "own.json").read_bytes()
    assert Plan.load(tmp_path / "own.json") == plan
