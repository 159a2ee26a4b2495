"""Trains a ×2 super-resolution network on two devices of unequal speed, then upscales a
photograph it has never seen.

The two are the CPU and, on other cores of it, the CPU slowed to half its speed on
purpose. `make run` starts this.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # the root, where examples.edsr is found

import hetconv
from examples import pictures
from examples.edsr import EDSR
from examples.photographs import (
    HELD_OUT,
    Batches,
    Pair,
    bicubic,
    load,
    psnr,
)
from hetconv.autotune.launch.launcher import parse_devices, run_on
from hetconv.autotune.measure.paired_rounds import paired
from hetconv.runtime import throttle

ROOT = Path(__file__).resolve().parents[1]
DEVICES = "cpu,cpu@0.5"  # the fast one first
# rows and columns of a low-resolution crop (the smallest photograph has 150); one crop
# is a batch
SIZE = 144
LEARNING_RATE = 1e-3
COMPARED = 20  # steps that the fast device also trains alone
ROUNDS = 7
SEED = 0


@dataclass(frozen=True)
class Options:
    steps: int
    trials: int
    budget: float
    out: Path
    start: float  # time.monotonic() when it all began

    def say(self, text: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            print(f"[{time.monotonic() - self.start:5.1f} s] {text}", flush=True)


def main(options: Options) -> None:
    """Tunes and plans on the command line, as one would for any model; then trains on
    both devices.
    """
    os.chdir(ROOT)
    options.out.mkdir(parents=True, exist_ok=True)
    cluster, plan = options.out / "cluster.json", options.out / "plan.json"
    model = f"--model examples.edsr:EDSR --input 1x3x{SIZE}x{SIZE} --mode train"
    limits = f"--trials {options.trials} --budget {options.budget:g}"
    run_hetconv(options, f"autotune --devices {DEVICES} {model} {limits} -o {cluster}")
    run_hetconv(options, f"plan --profile {cluster} {model} -o {plan}")
    options.say(f"training on {DEVICES.replace(',', ' and ')}")
    run_on(parse_devices(DEVICES), train_on_both, options, plan)


def run_hetconv(options: Options, arguments: str) -> None:
    options.say(f"python -m hetconv {arguments}")
    subprocess.run([sys.executable, "-m", "hetconv", *arguments.split()], check=True)


def train_on_both(options: Options, plan_file: Path) -> None:
    """What each of the two ranks does. The lines with hetconv in them are all that a
    split model asks for.
    """
    plan = hetconv.Plan.load(plan_file)
    compare_speed(options, plan)

    model = hetconv.parallelize(new_model(plan), plan)
    photograph = load(HELD_OUT)
    before = upscaled(model, photograph)
    losses = train(options, model, options.steps)
    after = upscaled(model, photograph)

    if dist.get_rank() == 0:
        compare_losses(options, plan, losses)
        plain = bicubic(photograph.low)
        found = {"bicubic": plain, "network before training": before, "after": after}
        scores = ", ".join(
            f"{name} {psnr(image, photograph.high):.2f} dB"
            for name, image in found.items()
        )
        options.say(f"the {HELD_OUT}, never trained on: {scores}")
        pictures.photographs(
            photograph, plain, after, options.out / "super_resolution.png"
        )
        options.say(
            f"look at {options.out}/super_resolution.png and {options.out}/timeline.png"
        )


def new_model(plan: hetconv.Plan) -> nn.Module:
    """With the same weights every time, in the memory format that was measured."""
    torch.manual_seed(SEED)
    memory_format = getattr(torch, plan.memory_format)
    model: nn.Module = EDSR().to(memory_format=memory_format)  # type: ignore[call-overload]
    return model


def trainer(model: nn.Module, steps: int) -> Callable[[Pair], float]:
    """A training step: takes a batch, gives its loss. It is the same for a split model
    and a plain one.
    """
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1
    )

    def step(batch: Pair) -> float:
        optimizer.zero_grad()
        loss = F.l1_loss(model(batch.low), batch.high)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.item()

    return step


def train(options: Options, model: nn.Module, steps: int) -> list[float]:
    """The loss of each of the first ``steps`` steps. Every rank draws the same batches."""
    step, batches, losses = (
        trainer(model, options.steps),
        Batches(SIZE, SEED),
        list[float](),
    )
    for number in range(1, steps + 1):
        losses.append(step(batches.next()))
        if number % 40 == 0:
            options.say(
                f"step {number} of {options.steps}, loss {fmean(losses[-40:]):.4f}"
            )
    return losses


def upscaled(model: nn.Module, photograph: Pair) -> Tensor:
    """The whole photograph at once: a plan's shares are proportions, for inputs of any size."""
    with torch.no_grad():
        image: Tensor = model(photograph.low)
    return image.clamp(0, 1)


def compare_losses(options: Options, plan: hetconv.Plan, split: list[float]) -> None:
    """The fast device alone starts from the same weights and takes the same batches."""
    alone = train(options, new_model(plan), min(COMPARED, options.steps))
    largest = max(abs(a - b) for a, b in zip(alone, split, strict=False))
    options.say(
        f"the fast device alone has the same losses: {len(alone)} steps, largest difference "
        f"{largest:.0e}"
    )


def compare_speed(options: Options, plan: hetconv.Plan) -> None:
    """The fast device alone, an even and the tuned split: steps of the three in turn,
    and who is busy when.
    """
    even = plan.with_splits(
        {name: hetconv.Split("height", (1, 1)) for name in plan.splits}
    )
    batch, many = Batches(SIZE, SEED).next(), 10 * ROUNDS
    split = {"even split": even, "tuned split": plan}
    steps = {
        n: partial(trainer(hetconv.parallelize(new_model(p), p), many), batch)
        for n, p in split.items()
    }
    alone = (
        partial(trainer(new_model(plan), many), batch)
        if dist.get_rank() == 0
        else lambda: 0.0
    )
    times = paired({"fast device alone": alone, **steps}, ROUNDS, torch.device("cpu"))
    seconds = {name: median(each) for name, each in times.items()}
    for name, typical in seconds.items():
        options.say(
            f"{name:17} {typical * 1e3:5.0f} ms a step, "
            f"{seconds['fast device alone'] / typical:.2f}x"
        )
    timelines = {name: typical_timeline(step) for name, step in steps.items()}
    if dist.get_rank() == 0:
        pictures.timelines(
            timelines,
            seconds["fast device alone"],
            DEVICES.split(","),
            options.out / "timeline.png",
        )


def typical_timeline(step: Callable[[], object]) -> pictures.Timeline:
    """When each device computed convolutions during a step: of a few steps, the one of
    median length.
    """
    recorded = []
    for _ in range(5):
        busy: list[tuple[float, float]] = []

        def note(
            seen: throttle.Computation, busy: list[tuple[float, float]] = busy
        ) -> None:
            busy.append((seen.start, seen.end))

        dist.barrier()
        start = time.perf_counter()
        with throttle.listen_to_computations(note):
            step()
        dist.barrier()
        length = time.perf_counter() - start
        ranks: list[list[tuple[float, float]]] = [
            [] for _ in range(dist.get_world_size())
        ]
        dist.all_gather_object(ranks, [(a - start, b - start) for a, b in busy])
        recorded.append(pictures.Timeline(length, ranks))
    return sorted(recorded, key=lambda one: one.seconds)[len(recorded) // 2]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120, help="of training")
    parser.add_argument(
        "--trials", type=int, default=8, help="ratios that autotune tries"
    )
    parser.add_argument(
        "--budget", type=float, default=120, help="seconds for autotune, about"
    )
    parser.add_argument(
        "--out",
        type=lambda path: Path(path).resolve(),
        default=Path("out"),
        help="where results go",
    )
    main(Options(**vars(parser.parse_args()), start=time.monotonic()))
