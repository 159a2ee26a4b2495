"""Two slices of one GPU as a pair of uneven devices: convolutions cut by filter, tuned against even, in turn.

CUDA's green contexts keep the multiprocessors of a GPU apart, so that two streams compute at different speeds at once,
and still share its memory. Nothing has to travel: what is compared is how well the work is divided.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import kernel_cases
from bench.kernel_cases import Case
from bench.kernel_checks import LIMITS, Tensors, affordable, drawn, error, exact
from bench.machine import facts, need_cuda
from bench.report import Report, untimed
from bench.timing import Timed, alternated, raced
from bench.verdict import Row, geomean, timed
from hetconv import kernels
from hetconv.errors import KernelError
from hetconv.layout import apportion

LAYERS = ("vgg16 256-256 3x3 @56", "vgg16 512-512 3x3 @28", "resnet50 64-256 1x1 @56", "unet 640-640 3x3 @32")
ROUNDS, TRIED_ROUNDS = 7, 3
CALLS = 20  # in a row
GRAIN = 16  # filters, of which kernels compute whole multiples
NEAR = (0.9, 0.95, 1.0, 1.05, 1.1)  # times the first slice's measured speed: what is tried to find the ratio
TUNED, RIVALS = "tuned", ("even", "alone")


class Slice(NamedTuple):
    """Some multiprocessors of a GPU, and a stream whose kernels run on no others."""

    sms: int
    stream: Any


Pair = tuple[Slice, Slice]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sms", type=int, metavar="N", help="multiprocessors of the first slice (default: two thirds)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop then, with what was measured")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the results here, after every case")


def run(args: argparse.Namespace) -> None:
    """Prints the slices, a line per case, what they come to, and one JSON document last, without cases if in a file.

    Raises `KernelError` where there is no GPU or it cannot be split so, `SystemExit` with status 1 if a result was
    wrong or a case failed.
    """
    where, machine = need_cuda("split-sm"), facts()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    with sliced(where, args.sms or machine["sms"] * 2 // 3) as pair:
        machine |= {"slices": [one.sms for one in pair]}
        report = Report("split-sm", verdict, line, where, machine, args.output, args.budget)
        print(f"{machine['device']}: slices of {' and '.join(str(s.sms) for s in pair)} multiprocessors", flush=True)
        try:
            report.fill(({"name": case.name, **asdict(case)}, partial(measured, case, pair, where)) for case in cases())
        finally:
            report.write()
    report.end(f"{TUNED} over {rival}: {found:.2f}x" for rival, found in gains(report.rows).items())


def cases() -> list[Case]:
    """Whole layers, in bf16."""
    names = {f"{layer} N32 bf16 K" for layer in LAYERS}
    return [case for case in kernel_cases.cases() if case.name in names]


@contextmanager
def sliced(device: torch.device, sms: int) -> Iterator[Pair]:
    """Two slices that share no multiprocessor: the first has ``sms``, as far as the driver's grain allows, or more.

    Raises `KernelError` where the driver does not split the GPU so.
    """
    driver = _driver()
    torch.zeros(1, device=device)  # there is a context that green ones belong to
    gpu = _called(driver.cuDeviceGet, device.index)
    whole = _called(driver.cuDeviceGetDevResource, gpu, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    found, count, rest = _called(driver.cuDevSmResourceSplitByCount, 1, whole, 0, sms)
    if not count or not rest.sm.smCount:
        raise KernelError(f"of {whole.sm.smCount} multiprocessors, {sms} leave none for a second slice; give fewer")
    with ExitStack() as stack:
        first, second = (_slice(driver, gpu, part, device, stack) for part in (found[0], rest))
        stack.callback(torch.cuda.synchronize, device)
        yield first, second


def _slice(driver: Any, gpu: Any, part: Any, device: torch.device, stack: ExitStack) -> Slice:
    """Destroyed as ``stack`` ends."""
    described = _called(driver.cuDevResourceGenerateDesc, [part], 1)
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM  # without which none is made
    context = _called(driver.cuGreenCtxCreate, described, gpu, flags)
    stack.callback(_called, driver.cuGreenCtxDestroy, context)
    stream = _called(driver.cuGreenCtxStreamCreate, context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
    stack.callback(_called, driver.cuStreamDestroy, stream)
    return Slice(part.sm.smCount, torch.cuda.ExternalStream(int(stream), device=device))


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise KernelError("bench split-sm calls CUDA's driver by cuda-bindings: pip install cuda-bindings") from e
    return driver


def _called(function: Any, *args: Any) -> Any:
    """What a function of the driver gives beside its status."""
    status, *found = function(*args)
    if status.value:
        raise KernelError(f"{function.__name__}: {status.name}; green contexts need a driver of CUDA 12.4 or newer")
    return found[0] if len(found) == 1 else found


def measured(case: Case, pair: Pair, where: torch.device) -> dict[str, Any]:
    """Of one case: how its filters are divided, and if they are computed right, seconds of each way."""
    t = drawn(case, "forward", where)

    def way(sizes: Sequence[int]) -> Timed:
        return Timed(lambda: [together(case, pair, sizes, t) for _ in range(CALLS)], CALLS, "loop")

    speeds = [1 / way(sizes).once() for sizes in ((case.K, 0), (0, case.K))]
    sizes = {TUNED: tuned(case.K, speeds, lambda sizes: way(sizes).once()), "even": divided(case.K, (1.0, 1.0))}
    sizes["alone"] = (case.K, 0) if speeds[0] >= speeds[1] else (0, case.K)
    row: dict[str, Any] = {"filters": sizes, "speeds": [s * case.spec.flops for s in speeds]}
    if not all(right(case, t, together(case, pair, parts, t)) for parts in sizes.values()):
        return row | {"wrong": "the parts are not the convolution"}
    row |= raced({name: way(parts) for name, parts in sizes.items()}, ROUNDS)
    return row | {"of_bound": 1 / sum(speeds) / (row[f"{TUNED}_us"] * 1e-6)}


def tuned(filters: int, speeds: Sequence[float], seconds: Callable[[Sequence[int]], float]) -> tuple[int, ...]:
    """The fastest of the divisions near that by measured speed."""
    near = dict.fromkeys(divided(filters, (speeds[0] * factor, speeds[1])) for factor in NEAR)
    times = alternated({str(sizes): partial(seconds, sizes) for sizes in near}, TRIED_ROUNDS)
    return min(near, key=lambda sizes: median(times[str(sizes)]))


def divided(filters: int, speeds: tuple[float, float]) -> tuple[int, ...]:
    return apportion(filters, speeds, GRAIN)


def together(case: Case, pair: Pair, sizes: Sequence[int], t: Tensors) -> list[Tensor]:
    """Each slice's filters of the convolution, at once; what comes next on the current stream waits for both."""
    here, found, first, s = torch.cuda.current_stream(), [], 0, case.spec
    for one, size in zip(pair, sizes, strict=True):
        if size:
            one.stream.wait_stream(here)
            with torch.cuda.stream(one.stream):
                own = t.w[first : first + size]
                found.append(kernels.conv2d_forward(t.x, own, None, s.stride, s.padding, s.dilation, s.groups))
        first += size
    for one, size in zip(pair, sizes, strict=True):
        if size:
            here.wait_stream(one.stream)
    return found


def right(case: Case, t: Tensors, parts: Sequence[Tensor]) -> bool:
    """Against float64, on the first samples."""
    samples = affordable(case)
    few = exact(replace(case, N=samples), "forward", t.first(samples))
    return error(torch.cat([*parts], 1)[:samples], few).within(LIMITS[case.dtype])


def gains(rows: Sequence[Row]) -> dict[str, float | None]:
    """The geometric mean of each rival's time over that of the tuned division."""
    return {rival: geomean(r["against"][rival]["ratio"] for r in timed(rows)) for rival in RIVALS if timed(rows)}


def verdict(report: Report) -> dict[str, Any]:
    return {"gains": gains(report.rows)}


def line(row: Row) -> str:
    head = f"{row['name']:34}"
    if (why := untimed(row)) is not None:
        return f"{head} {why}"
    divided_ = ":".join(map(str, row["filters"][TUNED]))
    rivals = ", ".join(f"{name} {row[f'{name}_us']:8.1f}: {row['against'][name]['ratio']:.2f}x" for name in RIVALS)
    return f"{head} {TUNED} {divided_:9} {row[f'{TUNED}_us']:8.1f} us, {row['of_bound']:4.0%} of the bound, {rivals}"
