"""What tuning came to, as a table and as JSON, of profiles made by hand."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from hetconv.autotune.cli import main
from hetconv.autotune.cli.summary import show_summary
from hetconv.autotune.launch import launcher
from hetconv.autotune.launch.launcher import parse_devices
from hetconv.autotune.measure.sampling import Passes
from hetconv.autotune.models import build
from hetconv.autotune.models.build import build_model
from hetconv.autotune.models.inputs import InputSpec
from hetconv.autotune.report.step_times import Summary, Way, summarize
from hetconv.autotune.search import tune
from hetconv.autotune.search.job import Job
from hetconv.autotune.search.journal import Store
from hetconv.autotune.search.record import Record, Study, Trial
from hetconv.planner.candidates import EVEN
from hetconv.planner.make_plan import contenders, make_plan
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE
from hetconv.schemas.tuning_results import TunedPlan, TunedRatio
from hetconv.sharding.split import Split
from hetconv.tracing.graph import Graph
from hetconv.tracing.tracer import capture
from tests.nets import Chain, splits_of

from .test_commands import NET

PAIR = ("cpu", "cpu@0.5")
ON_0 = f"{SINGLE_DEVICE} (0: cpu)"
TALK = "a model that talks"


@cache
def captured() -> Graph:
    return capture(Chain(), torch.zeros(2, 4, 16, 16))


def profile(**changed: Any) -> ClusterProfile:
    """Of a pair whose tuned plan cuts the convolutions 3:1, and the linears not at all."""
    graph = captured()
    splits = splits_of(Chain(), ("height",), (3, 1)) | dict.fromkeys(
        ("hidden", "head"), Split("replicate")
    )
    plan = TunedPlan(
        graph.digest,
        "train",
        "planned",
        splits,
        0.010,
        0.012,
        4,
        ON_0,
        0.015,
        None,
        "even split by height",
        0.025,
    )
    ratio = TunedRatio(
        graph.digest, "train", "height", (12, 4), 0.0105, (11, 5), 0.011, 7
    )
    return replace(
        ClusterProfile.from_devices(PAIR, link="host"),
        plans=(replace(plan, **changed),),
        tuned=(ratio,),
    )


def shown(summary: Summary) -> str:
    console = Console(record=True, width=120, file=io.StringIO())
    show_summary(summary, console)
    return console.export_text()


def test_a_plan_is_summarized_beside_an_even_split_and_a_device_alone() -> None:
    summary = summarize(captured(), profile(), "train")
    assert summary.tuned == Way("planned", 0.010, 0.012)
    assert summary.even is not None
    assert summary.alone is not None
    assert (summary.even.name, summary.even.measured_s) == (
        "even split by height",
        0.025,
    )
    assert (summary.alone.name, summary.alone.measured_s) == (ON_0, 0.015)
    assert summary.layers == {"height": 3, "replicate": 2}
    assert summary.shares == (0.75, 0.25)
    said = shown(summary)
    for words in (
        "Chain, train, on cpu, cpu@0.5 (emulated)",
        ("height ratio 12:4, 1.048x as fast as the computed 11:5; 7 trials"),
        "3 by height, 2 not cut; work: 75% : 25%; 4 plans measured",
        "+20%",
        "2.50x",
        "1.50x",
        "10.00",
        "12.00",
    ):
        assert words in said, said


def test_predictions_know_what_whole_steps_taught() -> None:
    graph, bare = captured(), ClusterProfile.from_devices(PAIR, link="host")
    devices = tuple(
        replace(d, corrections={"height": 1.9, "sample": 1.9}) for d in bare.devices
    )
    summary = summarize(graph, replace(profile(), devices=devices), "train")
    expected = {
        c.name: c.predicted.step_s
        for c in contenders(graph, replace(bare, devices=devices))
    }
    assert summary.alone is not None
    assert summary.even is not None
    assert summary.alone.predicted_s == expected[ON_0]
    assert summary.even.predicted_s == expected["even split by height"]
    assert (
        expected[ON_0]
        > 1.3 * {c.name: c.predicted.step_s for c in contenders(graph, bare)}[ON_0]
    )


def test_what_was_not_measured_is_null() -> None:
    graph, bare = captured(), ClusterProfile.from_devices(PAIR, link="host")
    summary = summarize(graph, bare, "train")
    found = json.loads(json.dumps(summary.to_json()))
    assert found["tuned"] is found["ratio"] is None
    assert found["alone"] == {
        "name": ON_0,
        "measured_s": None,
        "predicted_s": found["alone"]["predicted_s"],
    }
    assert found["even"]["measured_s"] is None
    assert found["even"]["predicted_s"] > 0
    assert found["speedup"] == {"over_even": None, "over_alone": None}
    assert found["trials"] == {"ratio": None, "plans": None}
    assert (found["layers"], found["shares"]) == ({}, [])
    assert "no whole plan was measured" in shown(summary)
    other_mode = summarize(graph, profile(), "infer")
    assert other_mode.tuned is other_mode.ratio is None
    without = summarize(
        graph, profile(even=None, even_s=None, alone=None, alone_s=None), "train"
    ).to_json()
    assert without["speedup"] == {"over_even": None, "over_alone": None}
    assert without["even"]["measured_s"] is without["alone"]["measured_s"] is None


def test_the_planner_knows_what_the_even_split_took() -> None:
    plan = make_plan(captured(), profile(even_s=1e-9))
    assert plan.alternatives is not None
    assert plan.alternatives[EVEN] == 1e-9


def test_a_device_alone_cuts_nothing() -> None:
    alone = {name: Split("sample", (2, 0)) for name in captured().layers}
    summary = summarize(
        captured(), profile(name=ON_0, splits=alone, step_s=0.015), "train"
    )
    assert (summary.layers, summary.shares) == ({}, (1.0, 0.0))
    assert "layers: none is cut; work: 100% : 0%" in shown(summary)


@pytest.fixture
def autotune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Runs the command but for its ranks, which are said to have measured a `profile`;
    its status, outputs, and job.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    jobs: list[Any] = []

    def run_on(devices: Any, fn: Any, job: Any) -> Record:
        jobs.append(job)
        studies = (Study("plans", ON_0, (Trial("planned", 0.5),)),)
        return Record(
            profile(), captured(), {"operators": 1.5, "plans": None}, {}, studies
        )

    def run(*args: str) -> tuple[int, str, str, list[Any]]:
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "hetconv",
                "autotune",
                "--devices",
                "cpu,cpu@0.5",
                *NET,
                "-o",
                "c.json",
                *args,
            ],
        )
        with pytest.raises(SystemExit) as exit_:
            main.main()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, *capsys.readouterr(), jobs

    def talkative(*args: Any) -> nn.Module:
        print(TALK, end="")
        return build_model(*args)

    monkeypatch.setattr(launcher, "run_on", run_on)
    monkeypatch.setattr(build, "build_model", talkative)
    return run


def test_the_command_prints_a_table_or_one_document_or_nothing(
    autotune: Callable[..., Any], tmp_path: Path
) -> None:
    status, said, wrong, jobs = autotune("--report", "new/report")
    assert (status, wrong, [job.quiet for job in jobs]) == (0, TALK, [False])
    assert "even split by height" in said
    assert said.endswith("wrote new/report/report.html\n")
    page = (tmp_path / "new/report/report.html").read_text()
    for words in (
        "Measured step",
        "Whole steps of Chain, train",
        "operators: 1.5 s",
        "0.500",
    ):
        assert words in page

    assert autotune("--quiet") == (0, "", TALK, jobs)
    assert jobs[-1].quiet
    for args in (("--json",), ("--json", "--quiet")):
        status, said, wrong, jobs = autotune(*args)
        found = json.loads(said)
        assert (status, wrong, jobs[-1].quiet) == (0, TALK, "--quiet" in args)
        assert (found["output"], found["report"]) == (str(tmp_path / "c.json"), None)
        assert found["stage_seconds"] == {"operators": 1.5, "plans": None}
        assert found["speedup"] == {"over_even": 2.5, "over_alone": 1.5}

    (tmp_path / "file").write_text("")
    ran = len(jobs)
    status, said, wrong, jobs = autotune("--report", "file")
    assert (status, said, len(jobs)) == (2, "", ran)
    assert "file/report.html cannot be written" in wrong


def test_stages_are_timed_unless_an_earlier_run_had_finished_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Resumed:
        """A job of which all that comes before the plans is done, and each of whose
        other stages takes two seconds.
        """

        graph, seconds = captured(), 1.0

        def __init__(self, job: Job, *rest: Any):
            print(TALK)
            self.store = Store(tmp_path / "it.db", {}, resume=False)
            self.store.keep("operators", "a conv", [{"0.5": [[1.0], [2.0]]}])
            self.store.study("plans", "it")

        def finished(self, stage: str) -> ClusterProfile | None:
            return profile() if stage != "plans" else None

        def finish(self, stage: str, found: ClusterProfile) -> ClusterProfile:
            return found

    def stage(run: Resumed, found: ClusterProfile) -> ClusterProfile:
        run.seconds += 2.0
        return found

    monkeypatch.setattr(tune, "Run", Resumed)
    monkeypatch.setattr(tune, "REFINING", dict.fromkeys(tune.REFINING, stage))
    named = tuple(parse_devices("cpu,cpu@0.5"))
    record = tune.tune(
        Job(
            named,
            "",
            "",
            InputSpec(),
            "train",
            3,
            60.0,
            tmp_path / "c.json",
            0,
            quiet=True,
        )
    )
    assert record.stage_s == {
        "operators": None,
        "plans": 2.0,
        "chunks": 2.0,
        "tiles": 2.0,
    }
    assert record.samples == {"a conv": [{0.5: Passes([1.0], [2.0])}]}
    assert record.studies == (Study("plans", "it", ()),)
    assert record.profile == ClusterProfile.load(tmp_path / "c.json") == profile()
    assert capsys.readouterr() == ("", TALK + "\n")
