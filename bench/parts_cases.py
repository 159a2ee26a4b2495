"""What `bench parts` measures, as data, who computes it, and whether that is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench import kernel_cases, kernel_checks
from bench.concat_works import SIZES
from bench.kernel_cases import Dtype
from bench.kernel_checks import EXACT_FLOPS, LIMITS, Error, Tensors, error, exact, poisoned
from hetconv import kernels
from hetconv.kernels.choice import Backend


@dataclass(frozen=True)
class Case:
    """A convolution of stride 1 to K channels of an image that keeps its size; ``widths`` are the parts' channels."""

    widths: tuple[int, ...]
    K: int
    kernel: int
    size: int
    N: int
    dtype: Dtype

    @property
    def name(self) -> str:
        parts = "+".join(map(str, self.widths))
        return f"{self.kernel}x{self.kernel} {parts}-{self.K} @{self.size} N{self.N} {self.dtype}"

    @property
    def conv(self) -> kernel_cases.Case:
        """The same of one tensor."""
        return kernel_cases.Case(
            self.name, self.N, sum(self.widths), self.size, self.size, self.K, self.kernel, self.kernel, 1,
            self.kernel // 2, 1, self.dtype, "K", self.K,
        )  # fmt: skip


class Layer(NamedTuple):
    C: int
    K: int
    kernel: int
    size: int
    N: int


LAYERS = (
    Layer(256, 256, 3, 56, 32),
    Layer(256, 256, 1, 56, 32),
    Layer(256, 256, 3, 28, 32),
    Layer(256, 256, 1, 28, 32),
    Layer(256, 256, 3, 128, 1),
    Layer(256, 256, 1, 128, 1),
    Layer(128, 128, 3, 512, 1),
    Layer(128, 128, 1, 512, 1),
    Layer(64, 64, 3, 56, 32),
    Layer(64, 256, 1, 56, 32),
)
WIDTHS = {256: tuple(SIZES.values()), 128: ((48, 80),), 64: ((24, 40),)}
UNALIGNED = (100, 156)  # of bf16 not a multiple of 16 bytes


def cases() -> list[Case]:
    """bf16 first; of other dtypes and of unaligned parts the first two layers."""
    found = [Case(widths, *layer[1:], "bf16") for layer in LAYERS for widths in WIDTHS[layer.C]]
    found += [Case(UNALIGNED, *layer[1:], "bf16") for layer in LAYERS[:2]]
    other: tuple[Dtype, ...] = ("fp16", "tf32")
    return found + [Case(SIZES[n], *layer[1:], d) for d in other for layer in LAYERS[:2] for n in (2, 3)]


def quick() -> list[Case]:
    """The cases that half a minute suffices for; what decides most first."""
    found = [Case(SIZES[3], *layer[1:], "bf16") for layer in LAYERS[:2]]
    found += [Case(WIDTHS[layer.C][0], *layer[1:], "bf16") for layer in (*LAYERS[2:4], LAYERS[6], *LAYERS[8:])]
    found += [Case(SIZES[8], *layer[1:], "bf16") for layer in LAYERS[:2]]
    return [*found, Case(SIZES[3], *LAYERS[0][1:], "fp16"), Case(SIZES[3], *LAYERS[0][1:], "tf32")]


class Inputs(NamedTuple):
    x: Tensor
    parts: list[Tensor]
    w: Tensor


def drawn(case: Case, device: torch.device) -> Inputs:
    x, w, _ = kernel_checks.drawn(case.conv, "forward", device)
    return Inputs(x, [p.contiguous(memory_format=torch.channels_last) for p in x.split(case.widths, 1)], w)


def in_place(case: Case, t: Inputs) -> Tensor:
    return kernels.conv2d_parts(t.parts, t.w, padding=case.kernel // 2, backend="triton")


def joined(case: Case, t: Inputs, join: Backend, backend: Backend) -> Tensor:
    s, x = case.conv.spec, kernels.concat_channels(t.parts, backend=join)
    return kernels.conv2d_forward(x, t.w, None, s.stride, s.padding, s.dilation, s.groups, backend=backend)


OURS = "parts"
CONTENDERS: dict[str, Callable[[Case, Inputs], Tensor]] = {
    OURS: in_place,
    "joined": partial(joined, join="auto", backend="aten"),  # channels by Triton on CUDA, then cuDNN
    "joined by triton": partial(joined, join="triton", backend="triton"),
}
RIVALS = tuple(name for name in CONTENDERS if name != OURS)


def errors(case: Case, t: Inputs) -> dict[str, Error]:
    """Of each contender's result, against float64 on the first samples and against cuDNN of one tensor on all."""
    conv, whole = case.conv, Tensors(t.x, t.w, t.w)
    samples = max(min(case.N, int(EXACT_FLOPS * case.N / conv.spec.flops)), 1)
    expected = exact(replace(conv, N=samples), "forward", whole.first(samples))
    other = kernel_checks.by_aten(conv, "forward", whole)
    found: dict[str, Error] = {}
    for name, contender in CONTENDERS.items():
        with poisoned():
            y = contender(case, t)
        found |= {f"{name}, float64": error(y[:samples], expected), f"{name}, cudnn": error(y, other)}
    return found


def wrong(case: Case, found: dict[str, Error]) -> dict[str, Error]:
    """Those errors that are too large. cuDNN rounds as well, so the limit is twice as large against it."""
    norm, worst = LIMITS[case.dtype]
    limits = {"float64": Error(norm, worst), "cudnn": Error(2 * norm, 2 * worst)}
    return {name: e for name, e in found.items() if not e.within(limits[name.rpartition(", ")[2]])}
