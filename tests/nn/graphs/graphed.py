"""A small model whose steps are captured by a recording stand-in."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hetconv.nn.step_graphs import EAGER_STEPS, StepGraphs
from tests.captures import RecordingCapture

CPU = torch.device("cpu")


class Net(nn.Module):
    """Layers with parameters and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.two = nn.Linear(4, 3)
        self.runs = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        self.runs += 1
        y = torch.relu(self.norm(self.one(x)))
        return {"y": self.two(y.mean((2, 3))) * scale}


class Graphed:
    """Calls a module through `StepGraphs`, as a parallelized model does."""

    def __init__(self, model: nn.Module):
        self.model, self.capture = model, RecordingCapture(model)
        self.graphs = StepGraphs(CPU, lambda: self.capture)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def run(args: Any, kwargs: Any) -> Any:
            return self.model.forward(*args, **kwargs)

        signature = self.graphs.signature(self.model, "forward of it", args, kwargs)
        if signature is None:
            return run(args, kwargs)
        return signature(run, args, kwargs)


def images(n: int = 2) -> Tensor:
    return torch.randn(n, 2, 6, 5)


def warm(graphed: Graphed, *args: Any) -> None:
    for _ in range(EAGER_STEPS + 1):
        graphed(*args)


def pair() -> tuple[Net, Graphed]:
    torch.manual_seed(0)
    plain = Net()
    return plain, Graphed(copy.deepcopy(plain))
