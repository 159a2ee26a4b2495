"""The stage of the tuning job that finds tiles of convolutions, on GPUs alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hetconv import kernels
from hetconv.autotune.launch.progress import Reporter
from hetconv.autotune.measure import timer
from hetconv.comm.rank_group import RankGroup, all_gather_object
from hetconv.kernels import Tile, dispatch
from hetconv.kernels.backend_choice import Backend, KernelQuery, unsupported_reason
from hetconv.kernels.chip import Chip, chip_of
from hetconv.kernels.launch import LaunchSequence, StridedLayout
from hetconv.kernels.tiles import GemmShape, versions_in_use
from hetconv.kernels.triton import dgrad, fprop, gemm_launch, wgrad
from hetconv.schemas.tuning_results import TunedTile

from .tile_search import (
    TRIALS,
    Choice,
    Found,
    WrongResultError,
    heuristic,
    search,
    space,
)

MIN_EQUAL_RESULTS = 4  # of a tile on the same inputs, bit for bit
# ‖found - expected‖ / ‖expected‖ of a right result, by dtype, or "tf32" where float32
# is multiplied so.
MAX_RELATIVE_ERROR = {"float32": 1e-5, "tf32": 2e-3, "float16": 2e-3, "bfloat16": 1e-2}


class Contest:
    """Timing of the tiles of one pass, and a check of their results.

    Called with a choice it returns its seconds, or raises `WrongResultError` or what a
    launch raised.
    """

    def __init__(self, question: KernelQuery, device: torch.device):
        s, self._what, self._device = question.spec, question.pass_name, device
        self._question, self._chip = question, chip_of(device)
        self._bound = MAX_RELATIVE_ERROR[
            "tf32" if question.precision == "tf32" else s.dtype
        ]
        self._x, self._w, self._g = (
            _drawn(shape, s.dtype, device)
            for shape in (s.x_shape, s.w_shape, s.y_shape)
        )
        self._truth = self._exact()

    @property
    def works(self) -> tuple[list[GemmShape], Chip]:
        """The matrix products that a tile is chosen for, and the chip."""
        return [product.shape for product in _products(self._question)], self._chip

    def __call__(self, choice: Choice) -> float:
        """Times one choice."""
        if choice == "aten":
            return timer.call_seconds(lambda: self._run("aten"), self._device)
        with _new_memory_is_nan():
            found = self._run("triton", choice)
        error = float(
            (found.to(self._truth.dtype) - self._truth).norm() / self._truth.norm()
        )
        if not error <= self._bound:  # NaN is not
            raise WrongResultError(f"it is off by {error:.1e} of the result's norm")
        for _ in range(MIN_EQUAL_RESULTS - 1):
            if not torch.equal(self._run("triton", choice), found):
                raise WrongResultError("it gives other bits from call to call")
        return timer.call_seconds(lambda: self._run("triton", choice), self._device)

    def obstacle(self, tile: Tile) -> str | None:
        """Compiles a tile before it is launched.

        Args:
            tile: the tile to compile.

        Returns:
            Why it must not be launched, or None. Nothing is known under Triton's
            interpreter.
        """
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        from hetconv.kernels.triton.compile_report import TOOLS, report

        if not (TOOLS / "cuobjdump").exists():
            return None
        for product in _products(self._question):
            found = report(
                _program(product, tile).launches[0],
                self._question.spec.dtype,
                self._chip.arch,
            )
            if found.spills or found.shared > self._chip.shared:
                return f"{found.spills} spills, {found.shared} bytes of shared memory"
            if found.left:
                return (
                    f"{found.left} left operands from registers, which gives other bits "
                    "from call to call"
                )
        return None

    def _run(
        self,
        backend: Backend,
        tile: Tile | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        s = self._question.spec
        geometry = (s.stride, s.padding, s.dilation, s.groups)
        x, w, g = (
            t if dtype is None else t.to(dtype) for t in (self._x, self._w, self._g)
        )
        if self._what == "forward":
            return kernels.conv2d_forward(
                x, w, None, *geometry, tile=tile, backend=backend
            )
        wanted = (
            self._what == "input gradient",
            self._what == "weight gradient",
            False,
        )
        found = kernels.conv2d_backward(
            g, x, w, *geometry, wanted, tile=tile, backend=backend
        )[wanted.index(True)]
        assert found is not None
        return found

    def _exact(self) -> Tensor:
        """By ATen, of the same numbers in a dtype beside whose rounding the bound is wide."""
        before = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
        try:
            return self._run(
                "aten",
                dtype=torch.float64
                if self._question.spec.dtype == "float32"
                else torch.float32,
            )
        finally:
            torch.backends.cudnn.conv.fp32_precision = before  # type: ignore[attr-defined]


Product = gemm_launch.ImplicitGemm | wgrad.WeightGradient


def _products(question: KernelQuery) -> list[Product]:
    """Returns the matrix products of a pass; an input gradient has one per phase."""
    s, precision = question.spec, question.precision
    shapes = (s.x_shape, s.w_shape, s.y_shape)
    lies = (
        torch.empty(n, dtype=getattr(torch, s.dtype), device="meta") for n in shapes
    )
    x, w, y = (
        StridedLayout.of(t.contiguous(memory_format=torch.channels_last)) for t in lies
    )
    if question.pass_name == "forward":
        return [fprop.forward(s, x, w, y, precision)]
    if question.pass_name == "weight gradient":
        return [wgrad.weight_gradient(s, x, w, y, precision)]
    return [p.gemm for p in dgrad.phases(s, y, w, x, precision) if p.gemm is not None]


def _program(product: Product, tile: Tile) -> LaunchSequence:
    return (
        wgrad.launches(product, tile)
        if isinstance(product, wgrad.WeightGradient)
        else gemm_launch.launches(product, tile)
    )


def _drawn(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    random = torch.Generator(device).manual_seed(0)
    t = torch.empty(
        shape,
        device=device,
        dtype=getattr(torch, dtype),
        memory_format=torch.channels_last,
    )
    return t.normal_(generator=random)


@contextmanager
def _new_memory_is_nan() -> Iterator[None]:
    """So that what a tile leaves unwritten shows, instead of the results of the one before."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def questions(step: Callable[[], Any]) -> list[KernelQuery]:
    """Lists the distinct passes of a step that a kernel can compute.

    Args:
        step: is called once.

    Returns:
        The passes, those with the most work first.
    """
    found: Counter[KernelQuery] = Counter()

    def count(question: KernelQuery) -> None:
        found[question] += 1

    dispatch.listeners.append(count)
    try:
        step()
    finally:
        dispatch.listeners.remove(count)
    able = [
        q for q in found if unsupported_reason(q) is None and q.tile is None
    ]  # a chunk comes with its whole's tile
    return sorted(able, key=lambda q: q.spec.flops * found[q], reverse=True)


class Kept(Protocol):
    """Where measurements are kept: `job.Run`."""

    def known(self, stage: str, key: str, type_: type[Found], /) -> Found | None:
        """Returns what was kept under a key of a stage, or None."""

    def keep(self, stage: str, key: str, value: Found, /) -> None:
        """Keeps a value under a key of a stage."""


def tune_tiles(
    step: Callable[[], Any],
    device: torch.device,
    group: RankGroup,
    enough: Callable[[], bool],
    say: Reporter,
    kept: Kept,
) -> tuple[TunedTile, ...]:
    """Tunes tiles of all ranks' passes of a step. Collective.

    First the default tile of each pass is compared with ATen, then come the studies,
    the i-th of every rank at the same time.

    Args:
        step: this rank's.
        device: this rank's; a CPU has no tiles.
        group: all ranks.
        enough: whether to stop early, asked on rank 0.
        say: tells a person how far the stage is.
        kept: keeps each pass's study as it ends; one that it knows is not run again.

    Returns:
        The tiles of all ranks.
    """
    asked = questions(step)
    own = asked if device.type == "cuda" else []
    counts = all_gather_object(group, len(own))
    found: dict[KernelQuery, Found] = {}
    for stage, trials in (("default tiles", 2), ("tiles", TRIALS)):
        say.stage(stage, max(counts))
        for i in range(max(counts)):
            if timer.broadcast_object(enough()):
                say.detail(
                    f"{stage}: {max(counts) - i} smaller passes were left out; --budget would "
                    "allow more"
                )
                break
            key, better = f"rank {group.rank}: {own[i]}" if i < len(own) else "", None
            if key and (better := kept.known(stage, key, Found)) is None:
                better = studied(own[i], device, trials, found.get(own[i]), enough)
            found |= {own[i]: better} if better is not None else {}
            for of_rank, known in all_gather_object(group, (key, better)):
                if known is not None and kept.known(stage, of_rank, Found) is None:
                    kept.keep(stage, of_rank, known)
            say.advance(_said(own[i], better) if better is not None else "")
    mine = [
        entry(q, f)
        for q, f in found.items()
        if any(t.choice == "aten" for t in f.trials)
    ]
    return merged(all_gather_object(group, mine))


def studied(
    question: KernelQuery,
    device: torch.device,
    trials: int,
    so_far: Found | None,
    enough: Callable[[], bool],
) -> Found | None:
    """Searches the fastest tile of a pass.

    Args:
        question: the pass.
        device: the GPU.
        trials: how many there may be in all.
        so_far: what an earlier search found.
        enough: whether to stop early.

    Returns:
        What was found, or None where nothing ran; ``so_far`` if memory does not suffice.
    """
    try:
        contest = Contest(question, device)
    except torch.OutOfMemoryError:
        return so_far
    works, chip = contest.works
    known = so_far.trials if so_far is not None else ()
    return search(
        space(works, chip),
        heuristic(works, chip),
        contest,
        trials=trials - len(known),
        known=known,
        obstacle=contest.obstacle,
        enough=enough,
    )


def entry(question: KernelQuery, found: Found) -> TunedTile:
    """Makes a profile's entry of what a search found."""
    q, origin = question, (question.device, *versions_in_use())
    return TunedTile(
        *origin,
        q.pass_name,
        q.spec,
        q.precision,  # type: ignore[arg-type]
        str(found.choice),
        found.seconds,
        found.heuristic_s,
    )


def merged(every: Sequence[Sequence[TunedTile]]) -> tuple[TunedTile, ...]:
    """Keeps the fastest tile of each problem that several GPUs of one name measured."""
    best: dict[Any, TunedTile] = {}
    for t in (t for tiles in every for t in tiles):
        key = (t.device, t.torch, t.triton, t.what, t.spec, t.precision)
        if key not in best or t.seconds < best[key].seconds:
            best[key] = t
    return tuple(best.values())


def _said(question: KernelQuery, found: Found) -> str:
    s, default = question.spec, found.heuristic_s
    than = (
        f", {default / found.seconds:.2f}x of the default tile"
        if default is not None
        else ""
    )
    shape = f"{s.N}x{s.C}x{s.H}x{s.W} by {s.K} filters {s.R}x{s.S}"
    return f"{question.pass_name} of {shape}: {found.choice}, {found.seconds * 1e6:.0f} us{than}"
