"""What is decided once for a signature is decided anew where anything differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetconv import kernels
from hetconv.errors import KernelError
from hetconv.kernels import Tile, dispatch, tiles
from hetconv.kernels.backend_choice import KernelQuery
from hetconv.kernels.launch import launching_by
from hetconv.kernels.launchers import decisions
from hetconv.kernels.launchers.recording import RecordedLaunch, RecordingLauncher
from hetconv.kernels.tiles import Pass
from tests.interpreter import (
    DEVICE,
    PASSES,
    POINTER,
    SAME,
    Tensors,
    by_triton,
    geometry,
    images,
    multiplying_in,
    tensors,
)

SPEC = images(64, 64, (8, 8), 3, 3, (1, 1), SAME, dtype="float32")
OTHER = Tile("pointer", 16, 32, 16, 4, 2)


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiles.tuned, "_installed", {})
    with multiplying_in("ieee"):
        yield


@contextmanager
def recording() -> Iterator[RecordingLauncher]:
    recorder = RecordingLauncher()
    with launching_by(recorder):
        yield recorder


def first_launch(
    recorder: RecordingLauncher, step: Callable[[], Any]
) -> RecordedLaunch:
    """The first launch of a step, which a sum of splits may follow."""
    recorder.clear()
    step()
    found, *_ = recorder.launches
    return found


def moved(t: Tensor, elements: int) -> Tensor:
    """The same numbers at an address that many elements after an aligned one."""
    memory = torch.empty(t.numel() + elements, dtype=t.dtype, device=t.device)
    return memory[elements:].as_strided(t.shape, t.stride()).copy_(t)


@pytest.mark.parametrize("what", PASSES)
def test_a_signature_is_decided_once(
    what: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    choose = dispatch.choose

    def recorded(*query: Any) -> Any:
        asked.append(query)
        return choose(*query)

    monkeypatch.setattr(dispatch, "choose", recorded)
    with recording():
        for seed in range(3):
            by_triton(what, SPEC, tensors(SPEC, seed))
    assert len(asked) == 1


@pytest.mark.parametrize("what", PASSES)
@pytest.mark.parametrize("name", ["x", "w", "g"])
def test_each_alignment_has_launches_of_its_own(what: Pass, name: str) -> None:
    """Also where the signature is the same: what is compiled for 16 bytes is not run on 4."""
    spec = replace(SPEC, dtype="float16")
    aligned = tensors(spec)
    shifted = aligned._replace(**{name: moved(getattr(aligned, name), 2)})
    with recording() as recorder:
        first = first_launch(recorder, lambda: by_triton(what, spec, aligned))
        second = first_launch(recorder, lambda: by_triton(what, spec, shifted))
        assert (
            first_launch(recorder, lambda: by_triton(what, spec, aligned)).kernel
            == first.kernel
        )
    reads_it = {"forward": "xw", "input gradient": "gw", "weight gradient": "gx"}
    assert first.kernel.fn.__name__.endswith("tma")
    if name in reads_it[what]:
        assert second.kernel.fn.__name__.endswith("pointers")
    else:
        assert second.kernel == first.kernel


def convolved(t: Tensors, shift: Tensor) -> None:
    by_triton("forward", SPEC, t._replace(bias=shift), POINTER)


def concatenated(t: Tensors, shift: Tensor) -> None:
    kernels.concat_channels([t.g], shift=shift, backend="triton")


@pytest.mark.parametrize("call", [convolved, concatenated])
def test_a_kernel_for_aligned_vectors_is_not_run_on_others(
    call: Callable[[Tensors, Tensor], None],
) -> None:
    """Of numbers per filter, whose addresses no layout has."""
    t, started = tensors(SPEC), []

    class Watching(RecordingLauncher):
        def launch(self, call: Any) -> Any:
            started.append(call.arguments["shift"].data_ptr() % 16)
            return super().launch(call)

    with launching_by(Watching()):
        for shift in (t.bias, moved(t.bias, 1)) * 2:
            call(t, shift)
    assert started == [0, 4]


@pytest.mark.parametrize("what", PASSES)
def test_precision_and_dtype(what: Pass) -> None:
    def seen(spec: Any, precision: str) -> Any:
        with multiplying_in(precision), recording() as recorder:
            found = first_launch(
                recorder, lambda: by_triton(what, spec, tensors(spec), POINTER)
            )
        return found.constants["PRECISION"]

    half = replace(SPEC, dtype="float16")
    order = [("ieee", SPEC), ("tf32", SPEC), ("tf32", half), ("ieee", SPEC)]
    assert [seen(spec, p) for p, spec in order] == ["ieee", "tf32", "ieee", "ieee"]


def test_precision_within_one_recording() -> None:
    t = tensors(SPEC)
    with recording() as recorder:
        for precision in ("ieee", "tf32", "ieee"):
            with multiplying_in(precision):
                by_triton("forward", SPEC, t, POINTER)
    found = [launch.constants["PRECISION"] for launch in recorder.launches]
    assert found == ["ieee", "tf32", "ieee"]


def test_backend_and_tile() -> None:
    t = tensors(SPEC)

    def launches(**how: Any) -> int:
        recorder.clear()
        kernels.conv2d_forward(t.x, t.w, t.bias, *geometry(SPEC), **how)
        return len(recorder.launches)

    with recording() as recorder:
        assert launches() == 0
        kernels.set_backend("triton")
        assert launches() >= 1
        assert launches(backend="aten") == 0
        kernels.set_backend("auto")
        assert launches() == 0
        assert launches(tile=replace(POINTER, split_k=2)) == 2
        assert launches(tile=POINTER) == 1


@pytest.mark.parametrize("what", PASSES)
def test_tiles_that_are_installed_later(what: Pass) -> None:
    t = tensors(SPEC)
    wanted = (what == "input gradient", what == "weight gradient", False)

    def widths() -> list[int]:
        recorder.clear()
        if what == "forward":
            kernels.conv2d_forward(t.x, t.w, None, *geometry(SPEC))
        else:
            kernels.conv2d_backward(t.g, t.x, t.w, *geometry(SPEC), wanted)
        return [found.constants["BLOCK_N"] for found in recorder.launches]

    name = kernels.backend_choice.device_name(DEVICE)
    with recording() as recorder:
        assert widths() == []
        for tile in (POINTER, OTHER):
            tiles.install({(what, SPEC, "ieee"): tile}, name)
            assert widths() == [tile.n]
        tiles.install({(what, SPEC, "ieee"): "aten"}, name)
        assert widths() == []


def test_listeners_hear_every_pass() -> None:
    t = tensors(SPEC)
    heard: list[KernelQuery] = []
    with recording():
        by_triton("forward", SPEC, t)
        dispatch.listeners.append(heard.append)
        try:
            for _ in range(2):
                kernels.conv2d_forward(t.x, t.w, None, *geometry(SPEC))
                kernels.conv2d_backward(t.g, t.x, t.w, *geometry(SPEC))
        finally:
            dispatch.listeners.clear()
        by_triton("forward", SPEC, t)
    assert [query.pass_name for query in heard] == list(PASSES) * 2


def test_another_device_is_refused_as_at_the_first_call() -> None:
    t = tensors(SPEC)
    by_aten = kernels.conv2d_forward(t.x, t.w, t.bias, *geometry(SPEC))
    assert by_aten.device == t.x.device
    with pytest.raises(KernelError, match=r"weight is .* on meta, but x is"):
        kernels.conv2d_forward(t.x, t.w.to("meta"), t.bias, *geometry(SPEC))
    on_meta = [s.to("meta") for s in (t.x, t.w, t.bias)]
    assert kernels.conv2d_forward(*on_meta, *geometry(SPEC)).device.type == "meta"


@pytest.mark.parametrize("name", ["x", "w", "bias", "g", "scale", "residual"])
def test_what_does_not_fit_is_refused_after_what_did(name: str) -> None:
    t = tensors(SPEC)
    ends = {"scale": torch.ones(64, device=DEVICE), "residual": t.g}

    def call(t: Tensors, **ends: Any) -> None:
        kernels.conv2d_forward(t.x, t.w, t.bias, *geometry(SPEC), **ends)
        kernels.conv2d_backward(t.g, t.x, t.w, *geometry(SPEC))

    call(t, **ends)
    if name in ends:
        ends[name] = ends[name][:1].double()
    else:
        t = t._replace(**{name: getattr(t, name)[:1].double()})
    with pytest.raises(KernelError):
        call(t, **ends)


def test_few_decisions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MAX_DECISIONS", 3)
    known: dict[int, str] = {}
    for i in range(10):
        decisions.remember(known, i, str(i))
        assert known[i] == str(i)
        assert len(known) <= 3
