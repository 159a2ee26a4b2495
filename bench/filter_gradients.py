"""The gradient of filters on a CPU as products of matrices against oneDNN's own: first whether right, then how fast.

Both compute in float32 with channels last on one thread, as ranks do, in turn, and over so many images that no cache
keeps them. Products run where `tap_products.are_faster` says so; elsewhere they are timed all the same.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.machine import commit, now, save, software
from bench.timing import sets_for
from bench.verdict import Demand
from hetconv.errors import KernelError
from hetconv.heap import keep_freed
from hetconv.kernels import tap_products

WARM_UP, ROUNDS = 1, 9
CACHES = 32 << 20  # bytes that they hold at most; images that are taken in turn fill twice as many
LEAST = 0.95  # of oneDNN's speed, wherever products are chosen
EXACT = 1e-4  # of the largest gradient, that a result may be off
Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """A convolution of ``taps`` x ``taps`` that keeps its image's size."""

    of: str
    images: int
    channels: int
    filters: int
    size: tuple[int, int]
    taps: int = 3

    @property
    def name(self) -> str:
        height, width = self.size
        return f"{self.images}x{self.channels}x{height}x{width} k{self.filters} {self.taps}x{self.taps}"


CASES = (
    Case("super-resolution", 1, 48, 48, (256, 256)),
    Case("super-resolution, its rows 3:1", 1, 48, 48, (64, 256)),
    Case("super-resolution, its columns 1:1", 1, 48, 48, (256, 128)),
    Case("super-resolution, its filters 3:1", 1, 48, 12, (256, 256)),
    Case("super-resolution, its first layer", 1, 3, 48, (256, 256)),
    Case("U-Net", 1, 16, 16, (192, 192)),
    Case("U-Net", 1, 32, 32, (96, 96)),
    Case("U-Net", 1, 64, 64, (48, 48)),
    Case("ResNet-18", 1, 64, 64, (56, 56)),
    Case("ResNet-18", 1, 128, 128, (28, 28)),
    Case("ResNet-18", 1, 256, 256, (14, 14)),
    Case("ResNet-18", 1, 512, 512, (7, 7)),
    Case("ResNet-18, eight images", 8, 64, 64, (56, 56)),
    Case("five taps", 1, 48, 48, (128, 128), 5),
    Case("one tap", 1, 48, 48, (128, 128), 1),
    Case("a small image", 1, 32, 32, (16, 16)),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the results here")


def run(args: Namespace) -> None:
    """Prints a line per convolution, what must hold, and the results as one JSON document last."""
    torch.set_num_threads(1)
    keep_freed()
    rows = [told(case) for case in CASES]
    chosen = [row["ratio"] for row in rows if row["chosen"]]
    least = min(chosen, default=None)
    print(f"must hold:\n  {Demand('where products are chosen, against oneDNN', LEAST, least)}")
    processor = {"capability": torch.backends.cpu.get_cpu_capability(), "date": now()}
    document = {"suite": "filter-gradients", "setup": software() | processor | commit(), "cases": rows}
    if args.output is not None:
        save(args.output, document)
    print(json.dumps(document))


def told(case: Case) -> dict[str, Any]:
    found = measured(case)
    how = "products" if found["chosen"] else "oneDNN's"
    ms = f"{found['products_ms']:7.2f} ms, oneDNN {found['onednn_ms']:7.2f}"
    print(f"{case.of:34} {case.name:24} {ms}: {found['ratio']:.2f}x, {how} is chosen", flush=True)
    return {"of": case.of, "name": case.name} | found


def measured(case: Case) -> dict[str, Any]:
    """Milliseconds of both, beside the gradient of the input; how many times as fast products are; the chosen one.

    Raises `KernelError` if these are not the gradient.
    """
    sets, w = tensors(case)
    off = error(sets[0], w)
    if off > EXACT:
        raise KernelError(
            f"products of {case.name} are off by {off:.1e} of the largest gradient, not {EXACT:g} at most"
        )
    ways: Mapping[str, Gradient] = {"products": products, "onednn": onednn, "input": of_input}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(WARM_UP + ROUNDS):
        for name, way in ways.items():
            start = time.perf_counter()
            for g, x in sets:
                way(g, x, w)
            seconds[name].append((time.perf_counter() - start) / len(sets))
    counted = {name: each[WARM_UP:] for name, each in seconds.items()}
    ratio = median(own / ours for own, ours in zip(counted["onednn"], counted["products"], strict=True))
    ms = {f"{name}_ms": round(median(each) * 1e3, 3) for name, each in counted.items()}
    height, width = case.size
    chosen = tap_products.are_faster(sets[0][1], w, height * width, (1, 1), 1)
    return ms | {"ratio": round(ratio, 3), "chosen": chosen, "error": off}


def tensors(case: Case) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Pairs of an output's gradient and an input that `CACHES` do not keep, and filters."""
    random = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).contiguous(memory_format=torch.channels_last)

    g, x = some(case.images, case.filters, *case.size), some(case.images, case.channels, *case.size)
    sets = [(g.clone(), x.clone()) for _ in range(sets_for(g.nbytes + x.nbytes, CACHES))]
    return sets, some(case.filters, case.channels, case.taps, case.taps)


def error(pair: tuple[Tensor, Tensor], w: Tensor) -> float:
    """Of `products`, as a part of the largest gradient in double precision."""
    (g, x), found = pair, products(*pair, w)
    exact = onednn(g.double(), x.double(), w.double())
    return float((found - exact).abs().max() / exact.abs().max())


def products(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
    side = w.shape[2] // 2
    return tap_products.gradient_of_filters(g, x, w, ((side, side),) * 2, (1, 1))


def onednn(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return _atens(g, x, w, 1)


def of_input(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return _atens(g, x, w, 0)


def _atens(g: Tensor, x: Tensor, w: Tensor, which: int) -> Tensor:
    """The gradient of input or filters, by its place."""
    side, ones, wanted = w.shape[2] // 2, (1, 1), [k == which for k in range(3)]
    found: Tensor = torch.ops.aten.convolution_backward(
        g, x, w, [len(w)], ones, (side, side), ones, False, (0, 0), 1, wanted
    )[which]
    return found
