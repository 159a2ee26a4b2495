"""Trains MONAI's 3-D U-Net on random windows, and validates on a volume by sliding windows.

    torchrun --nproc-per-node 2 --standalone examples/unet3d_sliding_windows.py segmented.pt

Without torchrun it is the plain program. The volume is random.
"""

import sys
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from torch import Tensor

import hetconv

WINDOW = (32, 32, 32)
VOLUME = torch.rand(1, 1, 40, 48, 40, generator=torch.Generator().manual_seed(0))


def random_windows(number: int) -> Iterator[Tensor]:
    for _ in range(number):
        i, j, k = (int(torch.randint(8, ())) for _ in WINDOW)
        yield VOLUME[:, :, i : i + 32, j : j + 32, k : k + 32]


def main(out: str = "segmented.pt") -> None:
    torch.manual_seed(0)
    model = UNet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)
    windows: Iterable[Tensor] = random_windows(4)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")  # "nccl" between GPUs
        # From data sheets. Once tuned: plan = hetconv.Plan.load("plan.json")
        profile = hetconv.ClusterProfile.from_devices(f"{dist.get_world_size()}xcpu")
        graph = hetconv.capture(model, torch.zeros(1, 1, *WINDOW))
        plan = hetconv.make_plan(graph, profile)
        model = hetconv.parallelize(model, plan)
        windows = hetconv.same_batches(windows)  # ranks might cut others
        print(f"rank {dist.get_rank()}: {plan.chosen}", flush=True)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x in windows:
        optimizer.zero_grad()
        loss = DiceCELoss(to_onehot_y=True, softmax=True)(model(x), x > 0.5)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        found = sliding_window_inference(VOLUME, WINDOW, 2, model)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", flush=True)
        torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
