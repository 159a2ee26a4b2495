"""What Workers refuse before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hetconv
from tests.workers.models import Failing, height_plan

PROFILE = hetconv.ClusterProfile.from_devices(["cpu", "cpu"], link="host")
PLAN = height_plan(Failing().eval(), torch.ones(1, 2, 9, 8))


@pytest.mark.parametrize(
    ("how", "devices", "error", "message"),
    [
        (None, ["cpu"], hetconv.HetConvError, "got nothing; measure them .*autotune"),
        (3, ["cpu"], hetconv.HetConvError, "take a plan or a profile, .* but got 3;"),
        (PLAN, ["cpu"], hetconv.PlanError, r"plan is for 2 devices, but 1 .*\(cpu\)"),
        (PLAN, [], hetconv.PlanError, r"for 2 devices, but 0 .*\(none\)"),
        (PLAN, "cpu,cpu,cpu", hetconv.PlanError, "for 2 devices, but 3"),
        (PROFILE, ["cpu"], hetconv.ProfileError, "profile is for 2 devices, but 1"),
        (PROFILE, ["cpu", "cuda:64"], hetconv.HetConvError, "'cuda:64' is not there"),
        (PROFILE, ["cpu", "gpu"], hetconv.HetConvError, "'gpu' is not understood"),
        (PROFILE, ["cpu", "cpu@2"], hetconv.HetConvError, "a speed between 0 and 1"),
    ],
)
def test_it_is_refused(
    how: Any, devices: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        hetconv.Workers(how, devices)


def test_files_are_told_apart(tmp_path: Path) -> None:
    plan, profile, other = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    PLAN.save(plan)
    PROFILE.save(profile)
    other.write_text("[1]")
    with pytest.raises(hetconv.PlanError, match="the plan is for 2 devices"):
        hetconv.Workers(plan, ["cpu"])
    with pytest.raises(hetconv.ProfileError, match="the profile is for 2 devices"):
        hetconv.Workers(str(profile), ["cpu"])
    with pytest.raises(hetconv.PlanError, match="a hetconv plan file says"):
        hetconv.Workers(other, ["cpu"])
    with pytest.raises(hetconv.PlanError, match="cannot be read"):
        hetconv.Workers(tmp_path / "none.json", ["cpu"])
