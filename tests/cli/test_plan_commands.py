"""The commands that look at plans, and the trace of a planned step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import hetconv
from hetconv.autotune.report import page
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Alternative
from hetconv.sharding.split import REPLICATE, Split

from .test_commands import NET
from .test_show import plan

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    ClusterProfile.from_devices(["T4", "T4"]).save(tmp_path / "cluster.json")
    plan().save(tmp_path / "a.json")
    plan().with_splits({"two": Split("filter", (4, 2))}).save(tmp_path / "b.json")
    return tmp_path


@pytest.fixture
def command(files: Path, command: Command) -> Command:
    """Beside these files."""
    return command


@pytest.mark.parametrize(("size", "alone"), [(128, False), (48, True)])
def test_a_plan_is_made_with_the_trace_of_its_step(
    size: int, alone: bool, files: Path, command: Command
) -> None:
    net = (*NET[:2], "--input", f"1x3x{size}x{size}")
    status, said, wrong = command(
        "plan", "--profile", "cluster.json", *net, "--trace", "new/trace.json"
    )
    assert status == 0, wrong
    assert "wrote new/trace.json" in said
    spans = [
        e
        for e in json.loads((files / "new/trace.json").read_text())["traceEvents"]
        if e["ph"] == "X"
    ]
    made = hetconv.Plan.load(files / "plan.json")
    assert made.predicted is not None
    assert made.chosen.startswith("fastest device alone") is alone
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(
        made.predicted.step_s * 1e6, abs=1e-2
    )
    assert any(e["cat"].startswith("backward") for e in spans)


def test_what_was_considered_is_shown(files: Path, command: Command) -> None:
    status, said, _ = command("show", "a.json", "--layer", "two")
    assert status == 0
    assert "computes longer, but moves less" in said
    whole = replace(
        plan().layers["one"],
        split=REPLICATE,
        alternatives=(Alternative(REPLICATE, 1, 0, 0),),
    )
    replace(plan(), layers={"": whole}).save(
        files / "root.json"
    )  # of a model that is one layer, whose name is empty
    assert "chosen" in command("show", "root.json", "--layer", "")[1]


def test_a_report_of_a_profile_and_its_plan_is_written(
    files: Path, command: Command
) -> None:
    replace(plan(), devices=("T4", "T4")).save(files / "c.json")
    for args in (("cluster.json", "c.json"), ("cluster.json",)):
        assert command("report", *args, "-o", "new/page.html") == (
            0,
            "wrote new/page.html\n",
            "",
        )
        page = (files / "new/page.html").read_text()
        assert ('id="layers"' in page) == (len(args) == 2)


def test_without_its_libraries_a_report_names_what_to_install(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "LIBRARIES", ("jinja2", "no_such_library"))
    status, said, wrong = command("report", "cluster.json")
    assert (status, said) == (2, "")
    assert wrong == (
        "hetconv: a report needs no_such_library, which is not installed: "
        "pip install no_such_library\n"
    )


@pytest.mark.parametrize(
    ("other", "status", "word"),
    [("a.json", 0, "no difference"), ("b.json", 1, "filter 4:2")],
)
def test_plans_are_compared_as_by_diff(
    other: str, status: int, word: str, command: Command
) -> None:
    found, said, _ = command("diff", "a.json", other)
    assert found == status
    assert word in said


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("diff", "a.json", "none.json"), "none.json: cannot be read"),
        (("diff", "a.json", "cluster.json"), "format is 'hetconv-profile'"),
        (
            ("show", "cluster.json", "--layer", "two"),
            "is a profile; give a plan with --layer",
        ),
        (
            ("show", "a.json", "--gathers", "--layer", "two"),
            "--gathers and --layer were given; give one",
        ),
        (("show", "a.json", "--layer", "nine"), "no layer 'nine'"),
        (("report", "a.json"), "a.json: format is 'hetconv-plan'"),
        (("report", "cluster.json", "cluster.json"), "format is 'hetconv-profile'"),
        (
            ("report", "cluster.json", "a.json"),
            "the plan is for a, b, but the profile has T4, T4; give the profile",
        ),
        (("report", "cluster.json", "-o", "."), ". is a folder; name a file in it"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    args: tuple[str, ...], expected: str, files: Path, command: Command
) -> None:
    before = sorted(files.iterdir())
    status, said, wrong = command(*args)
    assert (status, said, wrong.count("\n")) == (2, "", 1)
    assert expected in wrong
    assert sorted(files.iterdir()) == before
