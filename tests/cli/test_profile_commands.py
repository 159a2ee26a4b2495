"""The commands that look at a machine and at profiles, in this process, where torch is
imported; and one in its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hetconv.autotune.cli import doctor
from hetconv.autotune.cli.doctor import Pair, Report
from hetconv.autotune.cli.outdated import REMEDY
from hetconv.autotune.launch.probe import Outcome
from hetconv.autotune.measure.device_info import here
from hetconv.runtime.throttle import DeviceName
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Plan

from .test_commands import NET, hetconv_command
from .test_merge import A0, B0, BEFORE, NEW, OLD, profile, tuned

Command = Callable[..., tuple[int, str, str]]


def test_profiles_are_merged_and_what_is_stale_is_named(command: Command) -> None:
    replace(profile([A0], BEFORE, x=1.0, y=1.0), tuned=(tuned(BEFORE, (1,)),)).save(
        "a.json"
    )
    profile([A0], NEW, x=2.0).save("a2.json")
    profile([B0], OLD).save("b.json")
    status, said, wrong = command(
        "merge",
        "a.json",
        "a2.json",
        "b.json",
        "-o",
        "all.json",
        "--between",
        "ethernet-25g",
    )
    assert status == 0, wrong
    assert (
        "rank 1: A100 (GPU-b0) on b, measured with torch 2.13.0, triton 3.7.1, 2026-11-20T12:00:00Z"
        in said
    )
    assert "card of a, out" in said
    assert said.endswith("wrote all.json\n")
    assert wrong.splitlines() == [
        "warning: a.json: 1 entry that was tuned on other devices, or in another order, left out",
        "warning: measured with torch 2.11.0 (now 2.13.0), triton 3.6.0 (now 3.7.1): rank 0, "
        "cuda:0: 1 operator; " + REMEDY,
    ]
    assert ClusterProfile.load("all.json").world == 2


def test_a_plan_of_a_stale_profile_is_made_with_a_warning(command: Command) -> None:
    host, conditions = here()
    profile([replace(A0, host=host)], conditions).save("new.json")
    profile([replace(A0, host=host)], BEFORE).save("old.json")
    status, _, wrong = command("plan", *NET, "--profile", "new.json")
    assert (status, wrong) == (0, "")
    status, _, wrong = command("plan", *NET, "--profile", "old.json")
    assert status == 0
    assert wrong.startswith("warning: old.json: measured with torch 2.11.0 (now ")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("merge", "a.json", "-o", "c.json"), "a.json: cannot be read"),
        (
            ("merge", "sheets.json", "-o", "c.json"),
            "sheets.json: rank 0, 'T4', does not say which device it is",
        ),
        (("merge", "-o", "c.json"), "Missing argument"),
        (("merge", "sheets.json"), "Missing option"),
        (("doctor", "--devices", "tpu"), "device 'tpu' is not understood"),
        (
            ("doctor", "--devices", "cuda:99"),
            "'cuda:99' is not there; this process, whose torch is built without CUDA, sees cpu",
        ),
        (("doctor", "--timeout", "0"), "Invalid value for '--timeout'"),
        (("schema", "cluster"), "Invalid value for"),
    ],
)
def test_what_is_wrong_is_said(
    command: Command, args: tuple[str, ...], said: str
) -> None:
    ClusterProfile.from_devices("T4").save("sheets.json")
    status, _, wrong = command(*args)
    assert status == 2
    assert said in wrong
    assert not Path("c.json").exists()


@pytest.mark.parametrize(
    ("kind", "type_"), [("profile", ClusterProfile), ("plan", Plan)]
)
def test_the_schema_is_printed(
    command: Command, kind: str, type_: type[ClusterProfile] | type[Plan]
) -> None:
    status, said, _ = command("schema", kind)
    assert status == 0
    assert json.loads(said) == type_.schema()


def test_the_doctor_says_by_its_exit_status_whether_each_pair_has_a_backend(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def examine(devices: list[DeviceName], timeout: float) -> Report:
        asked.append((devices, timeout))
        return Report(
            "a",
            "EPYC",
            2,
            {},
            (),
            (Pair(("cpu", "cpu"), True, {"gloo": Outcome("fails in barrier", 1.0)}),),
        )

    monkeypatch.setattr(doctor, "examine", examine)
    status, said, _ = command("doctor", "--devices", "cpu,cpu@0.5", "--timeout", "3")
    assert (status, asked) == (1, [([DeviceName("cpu"), DeviceName("cpu", 0.5)], 3.0)])
    assert "cpu - cpu: gloo fails in barrier" in said
    status, said, _ = command("doctor", "--json")
    assert (status, json.loads(said)["healthy"]) == (1, False)


@pytest.mark.slow
def test_the_doctor_examines_this_machine(tmp_path: Path) -> None:
    done = hetconv_command(
        "doctor", "--devices", "cpu,cpu", "--timeout", "60", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pairs"][0]["outcomes"]["gloo"]["problem"] is None
    assert not list(tmp_path.iterdir())
