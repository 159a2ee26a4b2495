"""A rehearsal finds what a GPU would refuse, and every stage passes one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.gpu import rehearsal
from bench.gpu.rehearsal import check, descriptor_faults, faults
from hetconv import kernels
from hetconv.kernels.chip import CHIPS
from hetconv.kernels.launch import launching_by
from hetconv.kernels.launchers.recording import (
    RecordedDescriptor,
    RecordedLaunch,
    RecordingLauncher,
)

GOOD = RecordedDescriptor(
    1024, torch.bfloat16, (2, 8, 8, 64), (4096, 512, 64, 1), (1, 8, 8, 64)
)


def recorded() -> RecordedLaunch:
    """A convolution by TMA, as it is launched."""
    recorder = RecordingLauncher()
    x, w = (
        torch.empty(shape, dtype=torch.bfloat16, memory_format=torch.channels_last)
        for shape in ((2, 64, 32, 32), (64, 64, 3, 3))
    )
    with launching_by(recorder):
        kernels.conv2d(x, w, padding=1, backend="triton")
    launch, *_ = recorder.launches
    return launch


def test_a_launch_as_it_is_made_has_no_fault() -> None:
    assert any(isinstance(v, RecordedDescriptor) for v in recorded().arguments.values())
    assert faults(recorded(), CHIPS[90]) == []
    assert list(descriptor_faults(GOOD)) == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"address": 1032}, "its address 1032 is not a multiple of 16"),
        ({"strides": (4096, 512, 64, 2)}, "its innermost stride is 2"),
        ({"strides": (4096, 508, 64, 1)}, "are not multiples of 16 bytes"),
        ({"strides": (0, 512, 64, 1)}, "are not multiples of 16 bytes"),
        ({"shape": (2, 0, 8, 64)}, "its shape is"),
        ({"block": (1, 6, 8, 64)}, "its block is"),
        ({"block": (512, 1, 1, 64)}, "its block is"),
        ({"block": (1, 8, 8, 4)}, "has 512 bytes"),
    ],
)
def test_a_descriptor_that_the_copy_engine_refuses(
    changed: dict[str, Any], fault: str
) -> None:
    assert any(fault in found for found in descriptor_faults(GOOD._replace(**changed)))


def test_grids_and_shared_memory_are_checked() -> None:
    launch = recorded()
    too_many = launch._replace(grid=(1, 70000, 1))
    assert faults(too_many, CHIPS[90]) == ["a grid of (1, 70000, 1) programs"]
    staged = launch._replace(options=launch.options | {"num_stages": 40})
    assert any("shared memory" in fault for fault in faults(staged, CHIPS[90]))


@pytest.mark.parametrize("suite", ["kernels", "concat", "norms"])
def test_a_gpu_would_refuse_no_launch(suite: str) -> None:
    count, found = check(suite)
    assert count > 40
    assert not found


def test_a_refused_launch_fails_the_rehearsal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rehearsal, "check", lambda suite: (3, ["case: a grid"]))
    with pytest.raises(SystemExit):
        rehearsal.main("concat")
    assert "3 launches, 1 that a GPU would refuse" in capsys.readouterr().out
    monkeypatch.setattr(rehearsal, "check", lambda suite: (0, []))
    with pytest.raises(SystemExit):
        rehearsal.main("concat")
