"""Denoises latents as a pipeline of diffusers does, and decodes them on two devices.

    torchrun --nproc-per-node 2 --standalone examples/vae_decode.py images.pt

Without torchrun it is the plain program. The weights are small and random.
"""

import sys

import any_torch  # noqa: F401  # this checkout alone needs it
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DModel

import hetconv

LATENT = (1, 4, 32, 32)
DOWN, UP = ("DownBlock2D",) * 2, ("UpBlock2D",) * 2
ENCODE, DECODE = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2


def pipeline() -> tuple[UNet2DModel, DDIMScheduler, AutoencoderKL]:
    torch.manual_seed(0)
    sizes = {"block_out_channels": (16, 32), "norm_num_groups": 8}
    unet = UNet2DModel(32, 4, 4, down_block_types=DOWN, up_block_types=UP, **sizes)
    vae = AutoencoderKL(3, 3, ENCODE, DECODE, latent_channels=4, **sizes)
    return unet.eval(), DDIMScheduler(), vae.eval()


@torch.no_grad()
def main(out: str | None = None) -> None:
    unet, scheduler, vae = pipeline()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")  # "nccl" between GPUs
        # From data sheets. Once tuned: plan = hetconv.Plan.load("plan.json")
        profile = hetconv.ClusterProfile.from_devices(f"{dist.get_world_size()}xcpu")
        graph = hetconv.capture(vae.decoder, torch.zeros(LATENT))
        plan = hetconv.make_plan(graph, profile, mode="infer")
        vae.decoder = hetconv.parallelize(vae.decoder, plan)
        print(f"rank {dist.get_rank()}: {plan.chosen}", flush=True)

    rank, images = dist.get_rank() if dist.is_initialized() else 0, []
    for seed in range(2):
        # Every rank denoises the same latent; its decoding, which takes longest, is split.
        latent = torch.randn(LATENT, generator=torch.Generator().manual_seed(seed))
        scheduler.set_timesteps(4)
        for t in scheduler.timesteps:
            latent = scheduler.step(unet(latent, t).sample, t, latent).prev_sample
        images.append(vae.decode(latent / vae.config.scaling_factor).sample)
        if rank == 0:
            print(f"image {seed}: {tuple(images[-1].shape)}", flush=True)
    if out is not None and rank == 0:
        torch.save(torch.cat(images), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
