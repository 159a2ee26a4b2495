"""Trains a model of torchvision with Lightning Fabric.

    torchrun --nproc-per-node 2 --standalone examples/fabric_training.py state.pt

Without torchrun it is the plain program. The images are random.
"""

import os
import sys

import any_torch  # noqa: F401  # this checkout alone needs it
import torch
import torch.nn.functional as F
import torchvision
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

import hetconv
from hetconv.integrations.fabric import SplitStrategy


def main(out: str | None = None) -> None:
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes of torchrun
    fabric = Fabric(
        devices=devices, strategy=SplitStrategy() if devices > 1 else "auto"
    )
    fabric.launch()
    torch.manual_seed(0)
    images, labels = torch.randn(24, 3, 64, 64), torch.arange(24) % 10
    loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)
    model = torchvision.models.resnet18(num_classes=10).to(fabric.device)
    if fabric.world_size > 1:
        # From data sheets. Once tuned: plan = hetconv.Plan.load("plan.json")
        profile = hetconv.ClusterProfile.from_devices(f"{fabric.world_size}xcpu")
        graph = hetconv.capture(model, torch.zeros(8, 3, 64, 64))
        plan = hetconv.make_plan(graph, profile)
        model = hetconv.parallelize(model, plan)
        print(f"rank {fabric.global_rank}: {plan.chosen}", flush=True)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        text = f"loss {loss.item():.6f}, norm {norm.item():.6f}"
        fabric.print(text, flush=True)
    if out is not None:
        fabric.save(out, {"model": model, "optimizer": optimizer})  # of the plain model


if __name__ == "__main__":
    main(*sys.argv[1:])
