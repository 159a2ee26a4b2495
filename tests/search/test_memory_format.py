"""The memory format that a tuning job measures, which its plan hands on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hetconv.autotune.measure.device_info import conditions
from hetconv.autotune.search import job
from hetconv.planner.make_plan import make_plan
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.sharding.conv_spec import MemoryFormat
from hetconv.tracing.tracer import capture
from tests.nets import ResNet

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("fastest", "agreed"),
    [
        (["contiguous_format"] * 2, "contiguous_format"),
        (["channels_last"] * 2, "channels_last"),
        (["contiguous_format", "channels_last"], "channels_last"),
    ],
)
def test_ranks_agree_on_a_format(
    fastest: list[MemoryFormat], agreed: MemoryFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = None
    monkeypatch.setattr(job, "all_gather_object", lambda *_: fastest)
    assert job._agreed_format(group, CPU) == agreed


def test_a_plan_says_in_which_format_its_profile_was_measured() -> None:
    x = torch.zeros(2, 3, 45, 40)
    sheets = ClusterProfile.from_devices(["cpu", "cpu"], link="host")
    graph = capture(ResNet(), x)
    assert make_plan(graph, sheets).memory_format == "channels_last"
    measured = conditions(CPU, "contiguous_format")
    devices = tuple(replace(d, measured=measured) for d in sheets.devices)
    profile = replace(sheets, devices=devices)
    assert make_plan(graph, profile).memory_format == "contiguous_format"
