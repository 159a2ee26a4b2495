"""Launches of the GPU benchmarks, checked without a GPU.

Every case of a suite is computed on tensors that stand in for CUDA's, by a launcher that
records. What a GPU would refuse is found in the records: grids, alignment, tensor
descriptors and shared memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from bench.concat import works
from bench.kernels.cases import TORCH, Case, quick
from bench.kernels.checks import Tensors, by_triton
from bench.norms import suite as norms
from bench.tiles.study import candidates, studied
from hetconv import kernels
from hetconv.kernels import Tile
from hetconv.kernels.chip import CHIPS, Chip
from hetconv.kernels.launch import launching_by
from hetconv.kernels.launchers.recording import (
    RecordedDescriptor,
    RecordedLaunch,
    RecordingLauncher,
)
from hetconv.kernels.tiles import Pass

TMA_BYTES = 16  # that addresses and strides of a tensor descriptor divide by
MAX_BLOCK_SIDE, MAX_BLOCK_BYTES = 256, 1 << 18
MAX_GRID = (2**31 - 1, 65535, 65535)


def faults(launch: RecordedLaunch, chip: Chip) -> list[str]:
    """Returns what a GPU would refuse of a launch.

    Args:
        launch: The launch.
        chip: The GPU.
    """
    found = [*_grid_faults(launch.grid)]
    descriptors = {
        name: v
        for name, v in launch.arguments.items()
        if isinstance(v, RecordedDescriptor)
    }
    for name, descriptor in descriptors.items():
        found += (f"{name}: {fault}" for fault in descriptor_faults(descriptor))
    stages = launch.options.get("num_stages", 1)
    boxes = launch.constants.get("BOXES", 1)
    shared = stages * boxes * sum(_block_bytes(d) for d in _read(launch, descriptors))
    if shared > chip.shared:
        found.append(
            f"its blocks take {shared} bytes of the {chip.shared} of shared memory"
        )
    return found


def _grid_faults(grid: Sequence[int]) -> Iterator[str]:
    for size, most in zip(grid, MAX_GRID, strict=True):
        if not 1 <= size <= most:
            yield f"a grid of {tuple(grid)} programs"


def _read(
    launch: RecordedLaunch, descriptors: dict[str, RecordedDescriptor]
) -> list[RecordedDescriptor]:
    """Descriptors that the kernel reads; that of a second accumulator may be unused."""
    has_second = launch.constants.get("MORE_M", 0) > 0
    return [d for name, d in descriptors.items() if has_second or "more" not in name]


def _block_bytes(descriptor: RecordedDescriptor) -> int:
    return prod(descriptor.block) * descriptor.dtype.itemsize


def descriptor_faults(descriptor: RecordedDescriptor) -> Iterator[str]:
    """Yields what the copy engine would refuse of a descriptor."""
    item = descriptor.dtype.itemsize
    if descriptor.address % TMA_BYTES:
        yield f"its address {descriptor.address} is not a multiple of {TMA_BYTES}"
    *outer, innermost = descriptor.strides
    if innermost != 1:
        yield f"its innermost stride is {innermost}"
    if any(stride * item % TMA_BYTES or stride <= 0 for stride in outer):
        yield f"its strides {descriptor.strides} are not multiples of {TMA_BYTES} bytes"
    if not 1 <= len(descriptor.shape) <= 5 or min(descriptor.shape) < 1:
        yield f"its shape is {descriptor.shape}"
    sides = descriptor.block
    if any(side & (side - 1) or not 1 <= side <= MAX_BLOCK_SIDE for side in sides):
        yield f"its block is {sides}"
    if sides[-1] * item % TMA_BYTES or _block_bytes(descriptor) > MAX_BLOCK_BYTES:
        yield f"its block of {sides} has {_block_bytes(descriptor)} bytes"


Call = tuple[str, Callable[[], Any]]


def calls_of(suite: str) -> Iterator[Call]:
    """Yields the calls of a suite of kernels, with their names."""
    if suite == "kernels":
        for case in quick():
            for what in case.passes:
                yield _convolution(case, what, None)
    elif suite == "tiles":
        for case, what in studied():
            for tile in candidates(case, what, CHIPS[90]):
                yield _convolution(case, what, tile)
    elif suite == "concat":
        yield from _concatenations()
    else:
        yield from _norms()


def _convolution(case: Case, what: Pass, tile: Tile | None) -> Call:
    dtype = getattr(torch, TORCH[case.dtype])
    s = case.spec

    def call() -> Any:
        images = (
            _unwritten(shape, dtype) for shape in (s.x_shape, s.w_shape, s.y_shape)
        )
        return by_triton(case, what, Tensors(*images), tile)

    return f"{case.name}, {what}, {tile or 'default tile'}", call


def _unwritten(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A channels_last tensor whose memory the system never gives, as nobody touches it."""
    return torch.empty(tuple(shape), dtype=dtype, memory_format=torch.channels_last)


def _concatenations() -> Iterator[Call]:
    for case in works.quick():
        for what in works.WORKS:
            yield f"{case.name}, {what}", partial(_concatenation, case, what)


def _concatenation(case: works.Case, what: works.What) -> Any:
    dtype = works.DTYPES[case.dtype]
    parts = [
        _unwritten((case.samples, k, works.SIDE, works.SIDE), dtype) for k in case.sizes
    ]
    g = _unwritten((case.samples, works.CHANNELS, works.SIDE, works.SIDE), dtype)
    factors = torch.ones(works.CHANNELS)
    return works.by_triton(what, case, works.Inputs(parts, g, g, g, factors, factors))


def _norms() -> Iterator[Call]:
    for case in norms.cases():
        for work in norms.WORKS:
            yield f"{case.name}, {work}", partial(_norm, case, work)


def _norm(case: norms.Case, work: norms.Work) -> Any:
    memory, dtype = norms.MEMORIES[case.memory], norms.DTYPES[case.dtype]
    x, g = (
        torch.empty(case.shape, dtype=dtype, memory_format=memory) for _ in range(2)
    )
    factors = torch.ones(case.shape[1])
    var, mean = norms.statistics(case, x)
    return norms.by_triton(work, case, norms.Inputs(x, g, factors, factors, mean, var))


def check(suite: str, chip: Chip = CHIPS[90]) -> tuple[int, list[str]]:
    """Makes a suite's calls, and returns how many launches there were, and their faults.

    Args:
        suite: Name of the benchmark.
        chip: The GPU.
    """
    recorder, count, found = RecordingLauncher(), 0, list[str]()
    kernels.set_backend("triton")
    with launching_by(recorder):
        for name, call in calls_of(suite):
            recorder.clear()
            call()
            count += len(recorder.launches)
            for launch in recorder.launches:
                found += (f"{name}: {fault}" for fault in faults(launch, chip))
    return count, found


def main(suite: str) -> None:
    """Checks a suite; exits with status 1 if a GPU would refuse a launch, or there was none."""
    count, found = check(suite)
    print(
        "\n".join([*found, f"{count} launches, {len(found)} that a GPU would refuse"])
    )
    if found or not count:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
