"""Trains a ×2 super-resolution network on the devices that there are, and goes on without
those that are lost.

Start it on every machine under torch's elastic agent, as README.md shows, with a
directory for checkpoints that all of them see; or as `python examples/elastic.py`, alone.
When a machine is lost, the agents of the others start this program anew. It plans for
their devices and goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # the root, where examples.edsr is found

import hetconv
from examples.edsr import EDSR
from examples.photographs import Batches

SIZE = 48  # rows and columns of a low-resolution crop; one crop is a batch
SEED = 0
MAY_RESTART = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def main(options: argparse.Namespace) -> None:
    device = join()
    profile, name = options.profile, options.name
    if profile is None:
        profile, name = hetconv.ClusterProfile.from_devices("4xcpu"), "cpu"
    # Ranks change when machines come and go, so each tells which device it has.
    profile = hetconv.profile_of_ranks(profile, device, name=name)

    torch.manual_seed(SEED)
    batches, network = Batches(SIZE, SEED), EDSR(channels=32, blocks=4)
    plan = hetconv.make_plan(hetconv.capture(network, batches.at(0).low), profile)
    model = hetconv.parallelize(network.to(device, options.dtype), plan)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    # It fits, whatever the plan was when it was saved. Its extra is the step.
    path = options.checkpoint
    done = hetconv.load_checkpoint(path, model, optimizer, missing_ok=True) or 0
    devices = "; ".join(str(d.identity or d.name) for d in profile.devices)
    say(f"{devices}: {plan.chosen}, after step {done}")

    for step in range(done + 1, options.steps + 1):
        batch = batches.at(step)  # of a seed that depends on nothing but the step
        low, high = (x.to(device, options.dtype) for x in (batch.low, batch.high))
        optimizer.zero_grad()
        loss = F.mse_loss(model(low), high)
        loss.backward()
        optimizer.step()
        say(f"step {step} loss {loss.item():.12g} world {dist.get_world_size()}")
        if step % options.save_every == 0 or step == options.steps:
            hetconv.save_checkpoint(path, model, optimizer, extra=step)
    dist.destroy_process_group()


def join() -> torch.device:
    """Joins the ranks that the agents started, or makes the only one; its device."""
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "nccl"
    if dist.is_torchelastic_launched():
        if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True" and MAY_RESTART:
            sys.exit(
                "torchrun shares one store between its restarts, where ranks would find "
                "addresses of before; start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            )
        # Nothing is heard of a machine without power: others give up after this time.
        dist.init_process_group(backend, timeout=timedelta(minutes=2))
    else:
        dist.init_process_group(backend, "tcp://localhost:0", rank=0, world_size=1)
    return device


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--profile", type=hetconv.ClusterProfile.load, help="of all devices, a file")
    add("--name", help="of this machine's device in the profile, if it tells no hosts")
    add("--checkpoint", default="out/elastic", help="a directory")
    add("--steps", type=int, default=200)
    add("--save-every", type=int, default=10, help="steps between checkpoints")
    add("--dtype", type=lambda name: getattr(torch, name), default=torch.float32)
    main(parser.parse_args())
