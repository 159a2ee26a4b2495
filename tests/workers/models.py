"""Models that worker processes import, and plans that split them."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.shared.torchvision_operators import declare_operators
from hetconv.planner.make_plan import make_plan
from hetconv.planner.partition import whole_model
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Plan
from hetconv.tracing.tracer import capture

declare_operators()  # diffusers imports torchvision


class VaeDecoder(nn.Module):
    """The decoder of a small AutoencoderKL of diffusers, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import AutoencoderKL

        self.vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(16, 32),
            norm_num_groups=8,
        )

    def forward(self, latent: Tensor, return_dict: bool = True) -> Any:
        return self.vae.decode(latent, return_dict=return_dict)


@dataclass
class Found:
    """What `Nested` returns."""

    image: Tensor
    others: dict[str, tuple[Tensor, ...]]


class Nested(nn.Module):
    """A convolution of the first of several inputs, which come in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)

    def forward(
        self, x: Tensor, *, more: dict[str, list[Tensor]], scale: float
    ) -> Found:
        y = self.conv(x) * scale
        return Found(y, {name: (*ts, y[:, 1:3]) for name, ts in more.items()})


class Failing(nn.Module):
    """A convolution, and something else on one rank or on all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: Tensor, do: str = "", rank: int | None = None) -> Tensor:
        y: Tensor = self.conv(x)
        if rank is None or rank == dist.get_rank():
            if do == "raise":
                raise KeyError("of the\nmodel")
            if do == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if do == "sleep":
                print("called", flush=True)
                time.sleep(600)
            if do == "draw":
                y = y + torch.rand(())
            if do == "exit":
                sys.exit(3)
        return y


def height_plan(model: nn.Module, *args: Any, world: int = 2, **kwargs: Any) -> Plan:
    """A plan that cuts every layer by height, in unequal parts."""
    profile = ClusterProfile.from_devices(["cpu"] * world, link="host")
    graph = capture(model, *args, **kwargs)
    plan = make_plan(graph, profile, mode="infer")
    weights = range(1, world + 1)
    return plan.with_splits(whole_model(graph, "height", weights, ("height", "sample")))
