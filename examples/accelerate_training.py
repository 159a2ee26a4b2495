"""Trains a model of timm with Hugging Face's accelerate.

    torchrun --nproc-per-node 2 --standalone examples/accelerate_training.py state

Without torchrun it is the plain program. The images are random.
"""

import sys

import any_torch  # noqa: F401  # this checkout alone needs it
import timm
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import hetconv
from hetconv.integrations.accelerate import Accelerator  # for that of accelerate


def main(out: str | None = None) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    images, labels = torch.randn(18, 3, 64, 64), torch.arange(18) % 10
    loader = DataLoader(TensorDataset(images, labels), batch_size=4, shuffle=True)
    model = timm.create_model("resnet10t", num_classes=10).to(accelerator.device)
    if accelerator.use_distributed:
        # From data sheets. Once tuned: plan = hetconv.Plan.load("plan.json")
        devices = f"{accelerator.state.num_processes}xcpu"
        profile = hetconv.ClusterProfile.from_devices(devices)
        graph = hetconv.capture(model, torch.zeros(4, 3, 64, 64))
        plan = hetconv.make_plan(graph, profile)
        model = hetconv.parallelize(model, plan)
        print(f"rank {accelerator.process_index}: {plan.chosen}", flush=True)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, scheduler
    )
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        text = f"loss {loss.item():.6f}, norm {norm.item():.6f}"
        accelerator.print(text, flush=True)
    if out is not None:
        accelerator.save_state(out)  # of the plain model
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
