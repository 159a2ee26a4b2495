"""Time norms of one part by Triton's passes against torch's fused norms."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from bench.kernels.checks import Error, error, poisoned
from bench.shared.machine import facts, need_cuda
from bench.shared.report import Report, add_run_arguments, untimed
from bench.shared.timing import ceilings, prepared, raced, sets_for
from bench.shared.verdict import Row, geomean, timed
from hetconv.kernels import norms

Work = Literal["forward", "backward"]
WORKS: tuple[Work, ...] = get_args(Work)
ROUNDS, EPS = 7, 1e-5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LIMITS = {
    "bf16": Error(6e-3, 0.06),
    "fp16": Error(1e-3, 0.02),
    "fp32": Error(1e-5, 1e-4),
}
MEMORIES = {
    "channels-last": torch.channels_last,
    "contiguous": torch.contiguous_format,
}
IMAGES = {"early": (16, 128, 128), "middle": (16, 256, 56), "late": (16, 1024, 14)}
"""N, C and the side of square images, by stage of a network."""
ACCESSES: dict[Work, int] = {"forward": 3, "backward": 5}
"""How often a pass reads or writes an image at the least: statistics come before results."""


@dataclass(frozen=True)
class Case:
    """A norm of one part; ``groups`` is None for batch norm."""

    stage: str
    groups: int | None
    memory: str
    dtype: str

    @property
    def name(self) -> str:
        kind = "batch norm" if self.groups is None else f"{self.groups} groups"
        return f"{kind}, {self.stage}, {self.memory}, {self.dtype}"

    @property
    def shape(self) -> tuple[int, ...]:
        N, C, side = IMAGES[self.stage]
        return (N, C, side, side)

    @property
    def image_bytes(self) -> int:
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize


def cases(dtypes: tuple[str, ...] = tuple(DTYPES)) -> list[Case]:
    return [
        Case(stage, groups, memory, dtype)
        for dtype in dtypes
        for groups in (32, None)
        for memory in MEMORIES
        for stage in IMAGES
    ]


class Inputs(NamedTuple):
    """Image, gradient of the result, and, of every channel of every sample or of all
    samples, mean and inverse deviation as the forward computes them.
    """

    x: Tensor
    g: Tensor
    weight: Tensor
    bias: Tensor
    mean: Tensor
    invstd: Tensor


def drawn(case: Case, device: torch.device) -> Inputs:
    x, g = (
        torch.randn(case.shape, device=device, dtype=DTYPES[case.dtype]).contiguous(
            memory_format=MEMORIES[case.memory]
        )
        for _ in range(2)
    )
    weight, bias = (torch.rand(case.shape[1], device=device) + 0.5 for _ in range(2))
    var, mean = statistics(case, x)
    return Inputs(x, g, weight, bias, mean, (var + EPS).rsqrt())


def statistics(case: Case, x: Tensor) -> Tensor:
    """Variance and mean (2, N, C), or (2, 1, C) of all samples."""
    if case.groups is None:
        return norms.moments_of_channels(x, torch.float32)[:, None]
    of_groups = norms.moments(x, torch.float32, case.groups)
    return of_groups.repeat_interleave(x.shape[1] // case.groups, 2)


def by_triton(work: Work, case: Case, t: Inputs) -> Tensor:
    """The norm as a part computes it that is the whole: the result, or the gradient of x."""
    if work == "forward":
        var, mean = statistics(case, t.x)
        return norms.normalized(t.x, mean, var, t.weight, t.bias, EPS)
    C = t.x.shape[1]
    groups = case.groups or C
    if case.groups is None:
        sums = norms.sums_of_channels(t.g, t.x, t.mean[0], t.invstd[0])[:, None]
    else:
        sums = norms.sums(t.g, t.x, t.mean, t.invstd)
    of_groups = (sums * t.weight).unflatten(2, (groups, -1)).sum(3)
    total = of_groups.repeat_interleave(C // groups, 2)
    count = t.x.numel() // (len(t.mean) * groups)
    along, shift = total * (t.invstd / -count)
    along = along * t.invstd
    factors = (along, t.invstd * t.weight, shift - along * t.mean)
    return norms.combination(t.x, t.g, *factors)


def by_torch(work: Work, case: Case, t: Inputs) -> Tensor:
    weight, bias = t.weight.to(t.x.dtype), t.bias.to(t.x.dtype)
    aten, (N, C, *sides) = torch.ops.aten, t.x.shape
    running, wanted = (None, None), [True, True, True]
    gradients: tuple[Tensor, ...]
    if case.groups is None:
        if work == "forward":
            return torch.batch_norm(
                t.x, t.weight, t.bias, *running, True, 0.0, EPS, True
            )
        stats = (*running, t.mean[0], t.invstd[0])
        backward = aten.native_batch_norm_backward
        gradients = backward(t.g, t.x, t.weight, *stats, True, EPS, wanted)
        return gradients[0]
    if work == "forward":
        return torch.group_norm(t.x, case.groups, weight, bias, EPS)
    of_groups = (
        s[:, :: C // case.groups].to(t.x.dtype).contiguous() for s in (t.mean, t.invstd)
    )
    size = (N, C, sides[0] * sides[1], case.groups, wanted)
    backward = aten.native_group_norm_backward
    x, g = t.x, t.g
    if x.is_cuda:  # as autograd does there
        x, g = x.contiguous(), g.contiguous()
    gradients = backward(g, x, *of_groups, weight, *size)
    return gradients[0]


def exact(work: Work, case: Case, t: Inputs) -> Tensor:
    """The definition, in float64."""
    x = t.x.double().requires_grad_()
    weight, bias = t.weight.double(), t.bias.double()
    if case.groups is None:
        y = torch.batch_norm(x, weight, bias, None, None, True, 0.0, EPS, False)
    else:
        y = torch.group_norm(x, case.groups, weight, bias, EPS)
    if work == "forward":
        return y.detach()
    return torch.autograd.grad(y, x, t.g.double())[0]


def measured(case: Case, work: Work, report: Report) -> dict[str, Any]:
    """One work of one case: its error, and if that is small its times."""
    first = drawn(case, report.where)
    with poisoned():
        found = error(by_triton(work, case, first), exact(work, case, first))
    row: dict[str, Any] = {"error": tuple(found)}
    if not found.within(LIMITS[case.dtype]):
        return row | {"wrong": f"{found}"}
    moved = ACCESSES[work] * case.image_bytes
    count = sets_for(moved, report.machine["l2_bytes"])
    sets = [first, *(drawn(case, report.where) for _ in range(count - 1))]
    least_seconds = moved / report.ceilings["copy"]
    contenders = {
        "triton": lambda i: by_triton(work, case, sets[i]),
        "torch": lambda i: by_torch(work, case, sets[i]),
    }
    row |= raced(
        {n: prepared(call, count, least_seconds) for n, call in contenders.items()},
        ROUNDS,
    )
    return row | {"of_copy": least_seconds / (row["triton_us"] * 1e-6)}


def verdict(report: Report) -> dict[str, Any]:
    """Geometric means of torch's time over Triton's, by work."""
    rows = timed(report.rows)
    means = {w: geomean(r["ratio"] for r in rows if r["work"] == w) for w in WORKS}
    return {"copy_bytes_per_s": report.ceilings.get("copy"), "geomeans": means}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="bf16 alone")
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Prints a line per work, the means, and one JSON document last, without cases if in a file.

    Raises `KernelError` without a GPU, `SystemExit` with status 1 if a result was wrong
    or a case failed.
    """
    where = need_cuda("norms")
    report = Report("norms", verdict, line, where, facts(), args.output, args.budget)
    torch.manual_seed(0)
    try:
        report.ceilings = ceilings(where)
        report.fill(
            (
                {"name": case.name, "work": work, **asdict(case)},
                partial(measured, case, work, report),
            )
            for case in (cases(("bf16",)) if args.quick else cases())
            for work in WORKS
        )
    finally:
        report.write()
    means = verdict(report)["geomeans"].items()
    report.end(f"{work}: {mean} of torch's speed" for work, mean in means)


def line(row: Row) -> str:
    head = f"{row['name']:44} {row['work']:8}"
    if (why := untimed(row)) is not None:
        return f"{head} {why}"
    return (
        f"{head} {row['of_copy']:4.0%} of the copy's bandwidth, "
        f"{row['triton_us']:8.1f} us, torch {row['torch_us']:8.1f}: {row['ratio']:.2f}x"
    )
