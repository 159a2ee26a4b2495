"""Convolutions on a CPU, and their gradients, as products of matrices: first whether right, then how fast.

Torch's own and these compute in float32 with channels last, in turn, and over so many images and filters that no cache
keeps them. Products run where `aten.by_products` says so; elsewhere they are timed all the same.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
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
from hetconv.kernels import aten, column_products, tap_products
from hetconv.kernels.aten import PASSES
from hetconv.kernels.processor import has_products, short_vectors
from hetconv.kernels.tiles import Pass

WARM_UP, ROUNDS = 1, 9
CACHES = 32 << 20  # bytes that they hold at most; what is taken in turn fills twice as many
LEAST = 0.95  # of torch's speed, wherever products are chosen
EXACT = 1e-4  # of the largest result, that one may be off
Pieces = tuple[Tensor, Tensor, Tensor]
"""The output's gradient, the input and the filters."""
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """A convolution of ``taps`` x ``taps`` that, without ``stride``, keeps its image's size."""

    of: str
    images: int
    channels: int
    filters: int
    size: tuple[int, int]
    taps: int = 3
    stride: int = 1

    @property
    def name(self) -> str:
        (height, width), strided = self.size, f" /{self.stride}" if self.stride > 1 else ""
        return f"{self.images}x{self.channels}x{height}x{width} k{self.filters} {self.taps}x{self.taps}{strided}"

    @property
    def geometry(self) -> tuple[Any, ...]:
        """Stride, padding and dilation."""
        side, step = self.taps // 2, self.stride
        return (step, step), ((side, side), (side, side)), (1, 1)


CASES = (
    Case("super-resolution", 1, 48, 48, (256, 256)),
    Case("super-resolution, its rows 3:1", 1, 48, 48, (64, 256)),
    Case("super-resolution, its columns 1:1", 1, 48, 48, (256, 128)),
    Case("super-resolution, its filters 3:1", 1, 48, 12, (256, 256)),
    Case("super-resolution, its first layer", 1, 3, 48, (256, 256)),
    Case("U-Net", 1, 16, 16, (192, 192)),
    Case("U-Net", 1, 64, 64, (48, 48)),
    Case("U-Net", 1, 128, 128, (24, 24)),
    Case("U-Net, its last layer", 1, 16, 2, (192, 192), 1),
    Case("ResNet-18", 1, 64, 64, (56, 56)),
    Case("ResNet-18", 1, 128, 128, (28, 28)),
    Case("ResNet-18", 1, 256, 256, (14, 14)),
    Case("ResNet-18, its filters 2:1", 1, 256, 176, (14, 14)),
    Case("ResNet-18", 1, 256, 512, (14, 14), 3, 2),
    Case("ResNet-18", 1, 512, 512, (7, 7)),
    Case("ResNet-18, its filters 2:1", 1, 512, 336, (7, 7)),
    Case("ResNet-18, its channels 2:1", 1, 336, 512, (7, 7)),
    Case("ResNet-18, its rows 5:2", 1, 512, 512, (5, 7)),
    Case("ResNet-18, eight images", 8, 64, 64, (56, 56)),
    Case("ResNet-18, eight images", 8, 512, 512, (7, 7)),
    Case("ResNet-18, 320 pixels", 1, 512, 512, (10, 10)),
    Case("ResNet-18, 512 pixels", 1, 512, 512, (16, 16)),
    Case("ResNet-50", 1, 256, 64, (56, 56), 1),
    Case("ResNet-50", 1, 64, 256, (56, 56), 1),
    Case("ResNet-50", 1, 1024, 256, (14, 14), 1),
    Case("ResNet-50", 1, 512, 2048, (7, 7), 1),
    Case("ResNet-50", 1, 512, 1024, (28, 28), 1, 2),
    Case("ResNet-50", 1, 1024, 2048, (14, 14), 1, 2),
    Case("ResNet-50, eight images", 8, 256, 64, (56, 56), 1),
    Case("inverted residual", 1, 24, 144, (56, 56), 1),
    Case("inverted residual", 1, 144, 24, (56, 56), 1),
    Case("five taps", 1, 48, 48, (128, 128), 5),
    Case("five taps", 1, 128, 128, (9, 9), 5),
    Case("a small image", 1, 32, 32, (16, 16)),
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="as ranks compute with (default: 1)")


def run(args: Namespace) -> None:
    """Prints a line per convolution and pass, what must hold, and the results as one JSON document last."""
    if args.threads < 1:
        raise KernelError(f"--threads {args.threads} compute nothing; give at least 1")
    torch.set_num_threads(args.threads)
    keep_freed()
    rows = [row for case in CASES for row in told(case)]
    chosen = [row["ratio"] for row in rows if row["chosen"]]
    print(f"must hold:\n  {Demand('where products are chosen, against torch', LEAST, min(chosen, default=None))}")
    processor = {"capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    setup = software() | processor | {"date": now()} | commit()
    document = {"suite": "products", "setup": setup, "cases": rows}
    if args.output is not None:
        save(args.output, document)
    print(json.dumps(document))


def told(case: Case) -> Iterator[dict[str, Any]]:
    for what in PASSES:
        if what != "weight gradient" and not has_products():
            continue
        found = measured(case, what)
        how = "products" if found["chosen"] else "torch's"
        ms = f"{found['products_ms']:7.3f} ms, torch {found['torch_ms']:7.3f}"
        print(f"{case.of:34} {case.name:26} {what:15} {ms}: {found['ratio']:.2f}x, {how} chosen", flush=True)
        yield {"of": case.of, "name": case.name, "pass": what} | found


def measured(case: Case, what: Pass) -> dict[str, Any]:
    """Milliseconds of both; how many times as fast products are; whether they are chosen.

    Raises `KernelError` if they are wrong.
    """
    sets = pieces(case)
    off = error(case, what, sets[0])
    if off > EXACT:
        raise KernelError(f"products for {what} of {case.name} are off by {off:.1e} of the largest, not {EXACT:g}")
    ways: Mapping[str, Way] = {"products": products(case, what), "torch": torchs(case, what)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(WARM_UP + ROUNDS):
        for name, way in ways.items():
            start = time.perf_counter()
            for g, x, w in sets:
                way(g, x, w)
            seconds[name].append((time.perf_counter() - start) / len(sets))
    counted = {name: each[WARM_UP:] for name, each in seconds.items()}
    ratio = median(own / ours for own, ours in zip(counted["torch"], counted["products"], strict=True))
    ms = {f"{name}_ms": round(median(each) * 1e3, 4) for name, each in counted.items()}
    g, x, w = sets[0]
    chosen = what in aten.by_products(x, w, tuple(g.shape[2:]), case.geometry[0], 1)
    return ms | {"ratio": round(ratio, 3), "chosen": chosen, "error": off}


def pieces(case: Case) -> list[Pieces]:
    """As many as `CACHES` do not keep."""
    random, sides = torch.Generator().manual_seed(0), case.size

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).contiguous(memory_format=torch.channels_last)

    size = ((n - 1) // case.stride + 1 for n in sides)
    first = (
        some(case.images, case.filters, *size), some(case.images, case.channels, *sides),
        some(case.filters, case.channels, case.taps, case.taps),
    )  # fmt: skip
    count = sets_for(sum(t.nbytes for t in first), CACHES)
    return [first, *((first[0].clone(), first[1].clone(), first[2].clone()) for _ in range(count - 1))]


def error(case: Case, what: Pass, tensors: Pieces) -> float:
    """Of `products`, as a part of the largest number in double precision."""
    g, x, w = tensors
    exact = torchs(case, what)(g.double(), x.double(), w.double())
    return float((products(case, what)(g, x, w) - exact).abs().max() / exact.abs().max())


def products(case: Case, what: Pass) -> Way:
    stride, padding, dilation = case.geometry
    if what == "forward":
        return lambda g, x, w: column_products.forward(x, w, None, stride, padding, dilation)
    if what == "input gradient":
        return lambda g, x, w: column_products.gradient_of_input(g, x.shape, w, stride, padding, dilation)
    if (short_vectors() or not has_products()) and case.stride == 1:
        return lambda g, x, w: tap_products.gradient_of_filters(g, x, w, padding, dilation)
    return lambda g, x, w: column_products.gradient_of_filters(g, x, w, stride, padding, dilation)


def torchs(case: Case, what: Pass) -> Way:
    stride, padding, dilation = case.geometry
    if what == "forward":
        return lambda g, x, w: aten.torchs_conv(x, w, None, stride, padding, dilation, 1)
    wanted = what == "input gradient", what == "weight gradient", False

    def gradient(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        found = aten.torchs_gradients(g, x, w, stride, padding, dilation, 1, wanted)
        return next(t for t in found if t is not None)

    return gradient
