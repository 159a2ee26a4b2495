"""Predicted time of a tile: waves of programs, whose steps load and multiply.

A program's step takes as long as the slowest of what it does: products of all programs
that share the multiprocessor, their loads from the level-2 cache, a load's latency
divided by the stages that hide it, or one program's products and the overhead of a step.
Programs run in waves; images are read from memory once and, in part, again with each
wave; partial results of a split reduction are added by a second kernel.

The constants are fitted to measured tiles by ``python -m bench tiles --fit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from hetconv.kernels.chip import Chip
from hetconv.sharding.conv_spec import ITEMSIZE

from .gemm_shape import GemmShape
from .search_space import shared_bytes
from .tile import Tile

Numbers = NDArray[np.float64]

HALF_MACS_PER_CYCLE = {80: 1024, 86: 512, 89: 512, 90: 2048}
"""Of a multiprocessor, in float16, by compute capability; from data sheets."""
IEEE_MACS_PER_CYCLE = {80: 64, 86: 128, 89: 128, 90: 128}
"""The same in float32 without tensor cores."""
REGISTERS = 65536  # of a multiprocessor
MAX_WARPS = 64  # of a multiprocessor
OTHER_REGISTERS = 26  # of a thread, beside its accumulators, as compiled
REGISTER_UNIT = 8  # registers of a thread are given out in such blocks
MIN_TENSOR_CORE_ROWS = 64  # of an accumulator; of fewer the rest is lost
SHARED_BYTES_PER_PROGRAM = 1024  # that the driver adds


@dataclass(frozen=True)
class TimeModel:
    """Constants of the predicted time, for passes of one kind.

    Cycles are of the chip's clock.

    Attributes:
        efficiency: Products of a step, of what the data sheet allows.
        narrow: Additional time of products ``n`` columns wide, per 256 / n - 1.
        eight_warps: Time of products by 8 warps, of that by 4.
        sharing: Time of products of programs that share a multiprocessor, of that of
            the same products of one.
        step_cycles: What a step costs beside its products.
        latency_cycles: Latency of a load from the level-2 cache.
        miss_cycles: Additional latency of a load from memory.
        l2_bytes: Bytes per cycle that a multiprocessor reads from the level-2 cache.
        l2_miss_bytes: The same of images larger than that cache, which adds to it.
        fill_cycles: What a program costs beside its steps.
        stage_cycles: What it costs for each stage.
        store_cycles: What it costs for each result.
        memory: Bandwidth of memory, of the data sheet's.
        reread: Part of the images that is read again with each wave.
        launch_s: Seconds of a launch.
        split_s: Seconds of the launch that adds partial results.
        split_memory: Bandwidth at which they are written and added, of the data sheet's.
    """

    efficiency: float
    narrow: float
    eight_warps: float
    sharing: float
    step_cycles: float
    latency_cycles: float
    miss_cycles: float
    l2_bytes: float
    l2_miss_bytes: float
    fill_cycles: float
    stage_cycles: float
    store_cycles: float
    memory: float
    reread: float
    launch_s: float
    split_s: float
    split_memory: float


@dataclass(frozen=True)
class Workload:
    """Tiles of a matrix product as the model sees them; an array has a number per tile.

    Attributes:
        rows: Rows that a program multiplies.
        columns: Columns of a program.
        depth: Numbers reduced in a step.
        warps: Warps of a program.
        stages: Stages of software pipelining.
        splits: Programs that share a reduction.
        programs: Programs in all.
        steps: Steps of a program.
        resident: Programs that fit on a multiprocessor.
        results: Numbers of the result.
        operand_bytes: Bytes of the images, each once.
        item_bytes: Bytes of an operand's number.
        macs_per_cycle: Products of a multiprocessor and cycle, as the data sheet has it.
    """

    rows: Numbers
    columns: Numbers
    depth: Numbers
    warps: Numbers
    stages: Numbers
    splits: Numbers
    programs: Numbers
    steps: Numbers
    resident: Numbers
    results: Numbers
    operand_bytes: Numbers
    item_bytes: Numbers
    macs_per_cycle: Numbers


def workload(tiles: Sequence[Tile], shape: GemmShape, chip: Chip) -> Workload:
    """Returns what tiles of a matrix product make a chip do."""
    count = len(tiles)
    constants = (shape.results, shape.operand_bytes, ITEMSIZE[shape.dtype])
    columns = zip(*(_features(t, shape, chip) for t in tiles), strict=True)
    same = (
        np.full(count, float(c)) for c in (*constants, _macs_per_cycle(shape, chip))
    )
    return Workload(*(np.array(c, float) for c in columns), *same)


def joined(workloads: Sequence[Workload]) -> Workload:
    """Returns several workloads as one."""
    return Workload(
        *(
            np.concatenate([getattr(w, f.name) for w in workloads])
            for f in fields(Workload)
        )
    )


def _features(tile: Tile, shape: GemmShape, chip: Chip) -> tuple[float, ...]:
    rows = sum(max(m, MIN_TENSOR_CORE_ROWS) for m in tile.row_blocks if m)
    if tile.kind == "pointer" or shape.ieee:
        rows = tile.m
    steps = -(-shape.steps(tile) // tile.split_k)
    programs = shape.tiles(tile) * tile.split_k
    return (
        rows,
        tile.n,
        tile.k,
        tile.warps,
        tile.stages,
        tile.split_k,
        programs,
        steps,
        resident_programs(tile, shape, chip),
    )


def resident_programs(tile: Tile, shape: GemmShape, chip: Chip) -> int:
    """Returns the programs that fit on a multiprocessor at once."""
    threads = tile.warps * 32
    per_thread = tile.m * tile.n / threads + OTHER_REGISTERS
    registers = -(-per_thread // REGISTER_UNIT) * REGISTER_UNIT * threads
    by_memory = chip.shared // (shared_bytes(tile, shape) + SHARED_BYTES_PER_PROGRAM)
    return int(max(1, min(REGISTERS // registers, by_memory, MAX_WARPS // tile.warps)))


def _macs_per_cycle(shape: GemmShape, chip: Chip) -> float:
    by_arch = IEEE_MACS_PER_CYCLE if shape.ieee else HALF_MACS_PER_CYCLE
    arch = max(a for a in by_arch if a <= max(chip.arch, min(by_arch)))
    return by_arch[arch] if shape.ieee else by_arch[arch] * 2 / ITEMSIZE[shape.dtype]


def predicted_seconds(work: Workload, chip: Chip, model: TimeModel) -> Numbers:
    """Returns the seconds of each tile.

    Args:
        work: The tiles.
        chip: The GPU.
        model: Constants of the pass.
    """
    at_once = chip.sms * work.resident
    full_waves = np.floor(work.programs / at_once)
    left = work.programs - full_waves * at_once
    last = np.ceil(left / chip.sms)  # programs on a multiprocessor in the last wave
    cycles = full_waves * _program_cycles(work, work.resident, chip, model)
    cycles += np.where(
        left > 0, _program_cycles(work, np.maximum(last, 1), chip, model), 0
    )
    seconds = cycles / chip.clock_hz
    waves = full_waves + (left > 0)
    read = work.operand_bytes * (1 + model.reread * (waves - 1))
    moved = read + work.results * work.item_bytes
    in_memory = moved / (model.memory * chip.memory_bytes_per_s)
    partial = (2 * 4 * work.splits + work.item_bytes) * work.results
    adding = model.split_s + partial / (model.split_memory * chip.memory_bytes_per_s)
    seconds = np.hypot(seconds**2, in_memory**2) ** 0.5
    return model.launch_s + seconds + np.where(work.splits > 1, adding, 0)


def _program_cycles(
    work: Workload, sharing: Numbers, chip: Chip, model: TimeModel
) -> Numbers:
    """Cycles of a program of which ``sharing`` run on a multiprocessor at once."""
    macs = work.rows * work.columns * work.depth
    products = macs / (model.efficiency * work.macs_per_cycle)
    products = products * (1 + model.narrow * (256 / work.columns - 1))
    products = products * np.where(work.warps == 8, model.eight_warps, 1)
    loaded = (work.rows + work.columns) * work.depth * work.item_bytes
    exceeds_cache = np.minimum(1, work.operand_bytes / chip.l2_bytes)
    loads = loaded * (1 / model.l2_bytes + exceeds_cache / model.l2_miss_bytes)
    missing = work.operand_bytes / (work.programs * work.steps * loaded)
    latency = model.latency_cycles + model.miss_cycles * np.minimum(1, missing)
    together = np.where(sharing > 1, sharing * model.sharing, 1)
    step = np.maximum.reduce(
        [
            together * products,
            sharing * loads,
            latency / (work.stages - 1),
            products + model.step_cycles,
        ]
    )
    outside = model.fill_cycles + model.stage_cycles * work.stages
    stores = model.store_cycles * work.rows * work.columns * sharing
    total: Numbers = outside + work.steps * step + stores
    return total
