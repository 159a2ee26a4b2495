"""Functions that can be fused into a convolution, and the plan that records them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv.schemas.plan import Plan
from hetconv.tracing.fusion import fusible_functions
from tests.nets import NETS


def test_fusible_functions_of_a_resnet() -> None:
    model = NETS["resnet"][0]().eval()
    found = fusible_functions(hetconv.capture(model, torch.zeros(NETS["resnet"][1])))
    assert found == {
        "stem": ("batch_norm", "relu"),
        "blocks.0.conv1": ("batch_norm", "relu"),
        "blocks.0.conv2": ("batch_norm", "add", "relu"),
        "blocks.1.conv1": ("batch_norm", "relu"),
        "blocks.1.conv2": ("batch_norm", "add", "relu"),
        "blocks.1.down.0": ("batch_norm", "add", "relu"),
    }


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda m, x: F.relu(m.a(x)), ("relu",)),
        (lambda m, x: m.a(x), ()),
        (lambda m, x: F.relu(m.a(x)) + 1, ("relu",)),
        (lambda m, x: torch.tanh(m.a(x)), ()),
        (lambda m, x: (y := m.a(x)) + F.relu(y), ()),
        (lambda m, x: ((y := m.a(x)), F.relu(y)), ()),
        (lambda m, x: m.bn(F.relu(m.a(x))), ("relu",)),
        (lambda m, x: m.bn(m.a(x) + x), ("add",)),
        (lambda m, x: F.gelu(m.bn(m.a(x)).add_(x)), ("batch_norm", "add", "gelu")),
        (lambda m, x: m.a(x) + x[:1], ()),
        (lambda m, x: m.a(x) + 1, ()),
        (lambda m, x: F.relu(m.a(x).flatten(1)), ()),
        (lambda m, x: F.relu6(F.relu(m.a(F.silu(m.a(x))))), ()),
        (lambda m, x: F.relu(m.a(F.relu(m.a(x)))), ("relu",)),
    ],
)
def test_fusible_functions(
    forward: Callable[[Any, Tensor], Any], expected: tuple[str, ...]
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Any:
            return forward(self, x)

    assert (
        fusible_functions(hetconv.capture(Net().eval(), torch.zeros(2, 4, 5, 5))).get(
            "a", ()
        )
        == expected
    )


def test_nothing_is_fused_after_a_write_to_the_input() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            y = self.a(x)
            x.add_(1)
            return F.relu(y) + x

    assert fusible_functions(hetconv.capture(Net(), torch.zeros(1, 4, 5, 5))) == {}


def test_a_plan_keeps_them(tmp_path: Path) -> None:
    model = NETS["resnet"][0]().eval()
    graph = hetconv.capture(model, torch.zeros(NETS["resnet"][1]))
    plan = hetconv.make_plan(
        graph, hetconv.ClusterProfile.from_devices(["cpu", "cpu@0.5"]), mode="infer"
    )
    plan.save(tmp_path / "plan.json")
    for kept in (Plan.load(tmp_path / "plan.json"), plan.with_splits({})):
        assert {
            n: x.fusible for n, x in kept.layers.items() if x.fusible
        } == fusible_functions(graph)
