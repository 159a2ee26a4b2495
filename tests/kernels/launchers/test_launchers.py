"""Who makes launches: Triton at first, then its compiled kernels; or a recorder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton

from hetconv import kernels
from hetconv.errors import KernelError
from hetconv.kernels.launch import launches_on_cpu, launching_by
from hetconv.kernels.launchers.by_triton import KNOWN_VERSIONS
from hetconv.kernels.launchers.interface import KernelCall
from hetconv.kernels.launchers.recording import (
    RecordedDescriptor,
    RecordedLaunch,
    RecordingLauncher,
)
from tests import ROOT
from tests.interpreter import (
    ON_GPU,
    POINTER,
    SAME,
    TMA,
    Tensors,
    geometry,
    images,
    tensors,
)

SPEC = images(16, 24, (6, 5), 3, 3, (1, 1), SAME)
STRIDED = images(16, 24, (6, 8), 3, 3, (2, 2), SAME)
Step = Callable[[Tensors], Any]


class Watching:
    """Keeps what it is to launch, and prepares nothing for further calls."""

    runs_on_cpu = True

    def __init__(self) -> None:
        self.seen: list[RecordedLaunch] = []

    def launch(self, call: KernelCall) -> None:
        recorder = RecordingLauncher()
        recorder.launch(call)
        self.seen += recorder.launches


def forward(t: Tensors) -> Any:
    how: dict[str, Any] = {"tile": TMA, "backend": "triton"}
    return kernels.conv2d_forward(t.x, t.w, t.bias, *geometry(SPEC), out=t.g, **how)


def of_parts(t: Tensors) -> Any:
    parts, how = t.x.split(8, 1), {"padding": 1, "backend": "triton", "out": t.g}
    return kernels.conv2d_parts(parts, t.w, t.bias, **how)  # type: ignore[arg-type]


def input_gradient(t: Tensors) -> Any:
    wanted, how = (True, False, False), {"tile": POINTER, "backend": "triton"}
    return kernels.conv2d_backward(t.g, t.x, t.w, *geometry(STRIDED), wanted, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "step", "count"),
    [(SPEC, forward, 1), (SPEC, of_parts, 1), (STRIDED, input_gradient, 4)],
    ids=["tensor maps", "a tuple of tensors", "slices"],
)
def test_what_is_prepared_is_what_would_be_launched(
    spec: Any, step: Step, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernel, grid, addresses, scalars and constants, on tensors at other addresses."""
    first, second = tensors(spec, 0), tensors(spec, 1)
    memory = torch.empty_like(first.x)  # of results, always the same
    monkeypatch.setattr(torch.Tensor, "new_empty_strided", lambda *_: memory)
    recorder, watching = RecordingLauncher(), Watching()
    with launching_by(recorder):
        step(first)
        recorder.clear()
        step(second)
    with launching_by(watching):
        step(first)
        step(second)
    assert len(recorder.launches) == count
    assert recorder.launches == watching.seen[count:]
    assert recorder.launches != watching.seen[:count]


def test_a_recorded_launch() -> None:
    t, recorder = tensors(SPEC), RecordingLauncher()
    with launching_by(recorder):
        y = kernels.conv2d_forward(
            t.x, t.w, t.bias, *geometry(SPEC), tile=TMA, backend="triton"
        )
    (found,) = recorder.launches
    assert found.kernel.fn.__name__ == "implicit_gemm_tma"
    assert found.grid == (2, 1, 1)
    assert found.arguments["x"] == RecordedDescriptor(
        t.x.data_ptr(),
        torch.float16,
        shape=(2, 6, 5, 16),
        strides=(480, 80, 16, 1),
        block=(1, 8, 8, 16),
    )
    assert found.arguments["y"] == y.data_ptr()
    assert found.arguments["shift"] == t.bias.data_ptr()
    assert found.constants["BLOCK_M"] == TMA.m
    assert found.options == {"num_warps": TMA.warps, "num_stages": TMA.stages}


@pytest.mark.skipif(ON_GPU, reason="about the CPU")
def test_tensors_on_the_cpu_stand_in_only_while_launches_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    t = tensors(SPEC)
    with launching_by(RecordingLauncher()):
        forward(t)
        assert launches_on_cpu()
    with pytest.raises(KernelError, match="not on cpu"):
        forward(t)


def test_a_recorder_keeps_no_tensors() -> None:
    t, recorder = tensors(SPEC), RecordingLauncher()
    kept = sys.getrefcount(t.x)
    with launching_by(recorder):
        for _ in range(2):
            forward(t)
    still_kept = sys.getrefcount(t.x)
    assert still_kept == kept


@pytest.mark.skipif(ON_GPU, reason="Triton's own driver is there")
@pytest.mark.skipif(
    not triton.__version__.startswith(KNOWN_VERSIONS),
    reason=f"triton {triton.__version__} makes every launch itself",
)
def test_direct_launches_are_triton_s_own() -> None:
    """Of compiled kernels, with a driver that only keeps what it is given."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.launchers.direct_launches"],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "11\n"
