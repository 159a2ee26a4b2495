"""What tuning came to, as a table and as JSON, of profiles made by hand; and the rounds that it rests on."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from hetconv.autotune import cli, plans, tune
from hetconv.autotune.field import even_split
from hetconv.autotune.job import Job
from hetconv.autotune.launch import parse_devices
from hetconv.autotune.models import build_model
from hetconv.autotune.plans import _Plans
from hetconv.autotune.race import Alone, Order, Outcome
from hetconv.autotune.record import Record, Study, Trial, studies_of
from hetconv.autotune.sampling import Passes
from hetconv.autotune.shares import TrialFailedError
from hetconv.autotune.store import Store
from hetconv.autotune.summary import Summary, Way, show_summary, summarize
from hetconv.candidates import EVEN, Candidates
from hetconv.graph import Graph
from hetconv.plan import ALONE
from hetconv.planner import contenders, make_plan
from hetconv.profile import ClusterProfile, TunedRatio
from hetconv.recorder import capture
from hetconv.splits import Split
from hetconv.tuned import TunedPlan

from .nets import Chain, splits_of
from .test_cli import NET

PAIR = ("cpu", "cpu@0.5")
ON_0 = f"{ALONE} (0: cpu)"
TALK = "a model that talks"


@cache
def captured() -> Graph:
    return capture(Chain(), torch.zeros(2, 4, 16, 16))


def profile(**changed: Any) -> ClusterProfile:
    """Of a pair whose tuned plan cuts the convolutions 3:1, and the linears not at all."""
    graph = captured()
    splits = splits_of(Chain(), ("height",), (3, 1)) | dict.fromkeys(("hidden", "head"), Split("replicate"))
    plan = TunedPlan(
        graph.digest, "train", "planned", splits, 0.010, 0.012, 4, ON_0, 0.015, None, "even split by height", 0.025
    )
    ratio = TunedRatio(graph.digest, "train", "height", (12, 4), 0.0105, (11, 5), 0.011, 7)
    return replace(ClusterProfile.from_devices(PAIR, link="host"), plans=(replace(plan, **changed),), tuned=(ratio,))


def shown(summary: Summary) -> str:
    console = Console(record=True, width=120, file=io.StringIO())
    show_summary(summary, console)
    return console.export_text()


def test_a_plan_is_summarized_beside_an_even_split_and_a_device_alone() -> None:
    summary = summarize(captured(), profile(), "train")
    assert summary.tuned == Way("planned", 0.010, 0.012)
    assert summary.even is not None
    assert summary.alone is not None
    assert (summary.even.name, summary.even.measured_s) == ("even split by height", 0.025)
    assert (summary.alone.name, summary.alone.measured_s) == (ON_0, 0.015)
    assert summary.layers == {"height": 3, "replicate": 2}
    assert summary.shares == (0.75, 0.25)
    said = shown(summary)
    for words in (
        "Chain, train, on cpu, cpu@0.5 (emulated)", "height ratio 12:4, 1.048x as fast as the computed 11:5; 7 trials",
        "3 by height, 2 not cut; work: 75% : 25%; 4 plans measured", "+20%", "2.50x", "1.50x", "10.00", "12.00",
    ):  # fmt: skip
        assert words in said, said


def test_predictions_know_what_whole_steps_taught_and_how_fast_devices_were() -> None:
    graph, bare = captured(), ClusterProfile.from_devices(PAIR, link="host")
    devices = tuple(replace(d, corrections={"height": 1.9, "sample": 1.9}, pulse_s=1e-3) for d in bare.devices)
    summary = summarize(graph, replace(profile(pulse_s=(2e-3, 3e-3)), devices=devices), "train")
    then = replace(bare, devices=tuple(replace(d, pulse_s=1e-3) for d in devices)).at_pulses((2e-3, 3e-3))
    expected = {c.name: c.predicted.step_s for c in contenders(graph, then)}
    assert summary.alone is not None
    assert summary.even is not None
    assert summary.alone.predicted_s == expected[ON_0]
    assert summary.even.predicted_s == expected["even split by height"]
    assert expected[ON_0] > 1.8 * {c.name: c.predicted.step_s for c in contenders(graph, bare)}[ON_0]


def test_what_was_not_measured_is_null() -> None:
    graph, bare = captured(), ClusterProfile.from_devices(PAIR, link="host")
    summary = summarize(graph, bare, "train")
    found = json.loads(json.dumps(summary.to_json()))
    assert found["tuned"] is found["ratio"] is None
    assert found["alone"] == {"name": ON_0, "measured_s": None, "predicted_s": found["alone"]["predicted_s"]}
    assert found["even"]["measured_s"] is None
    assert found["even"]["predicted_s"] > 0
    assert found["speedup"] == {"over_even": None, "over_alone": None}
    assert found["trials"] == {"ratio": None, "plans": None}
    assert (found["layers"], found["shares"]) == ({}, [])
    assert "no whole plan was measured" in shown(summary)
    other_mode = summarize(graph, profile(), "infer")
    assert other_mode.tuned is other_mode.ratio is None
    without = summarize(graph, profile(even=None, even_s=None, alone=None, alone_s=None), "train").to_json()
    assert without["speedup"] == {"over_even": None, "over_alone": None}
    assert without["even"]["measured_s"] is without["alone"]["measured_s"] is None


def test_the_planner_knows_what_the_even_split_took() -> None:
    plan = make_plan(captured(), profile(even_s=1e-9))
    assert plan.alternatives is not None
    assert plan.alternatives[EVEN] == 1e-9


def test_a_device_alone_cuts_nothing() -> None:
    alone = {name: Split("sample", (2, 0)) for name in captured().layers}
    summary = summarize(captured(), profile(name=ON_0, splits=alone, step_s=0.015), "train")
    assert (summary.layers, summary.shares) == ({}, (1.0, 0.0))
    assert "layers: none is cut; work: 100% : 0%" in shown(summary)


@pytest.fixture
def autotune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs the command but for its ranks, which are said to have measured a `profile`; its status, outputs, and job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    jobs: list[Any] = []

    def run_on(devices: Any, fn: Any, job: Any) -> Record:
        jobs.append(job)
        studies = (Study("plans", ON_0, (Trial("planned", 0.5),)),)
        return Record(profile(), captured(), {"operators": 1.5, "plans": None}, {}, studies)

    def run(*args: str) -> tuple[int, str, str, list[Any]]:
        monkeypatch.setattr(
            sys, "argv", ["hetconv", "autotune", "--devices", "cpu,cpu@0.5", *NET, "-o", "c.json", *args]
        )
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, *capsys.readouterr(), jobs

    def talkative(*args: Any) -> nn.Module:
        print(TALK, end="")
        return build_model(*args)

    monkeypatch.setattr(cli, "run_on", run_on)
    monkeypatch.setattr(cli, "build_model", talkative)
    return run


def test_the_command_prints_a_table_or_one_document_or_nothing(autotune: Callable[..., Any], tmp_path: Path) -> None:
    status, said, wrong, jobs = autotune("--plot", "new/plots")
    assert (status, wrong, [job.quiet for job in jobs]) == (0, TALK, [False])
    assert "even split by height" in said
    assert said.endswith("wrote new/plots/history.svg\nwrote new/plots/links.svg\n")
    assert [p.name for p in sorted((tmp_path / "new/plots").iterdir())] == ["history.svg", "links.svg"]

    assert autotune("--quiet") == (0, "", TALK, jobs)
    assert jobs[-1].quiet
    for args in (("--json",), ("--json", "--quiet")):
        status, said, wrong, jobs = autotune(*args)
        found = json.loads(said)
        assert (status, wrong, jobs[-1].quiet) == (0, TALK, "--quiet" in args)
        assert (found["output"], found["plots"]) == (str(tmp_path / "c.json"), [])
        assert found["stage_seconds"] == {"operators": 1.5, "plans": None}
        assert found["speedup"] == {"over_even": 2.5, "over_alone": 1.5}

    (tmp_path / "file").write_text("")
    ran = len(jobs)
    status, said, wrong, jobs = autotune("--plot", "file")
    assert (status, said, len(jobs)) == (2, "", ran)
    assert "no picture can be written to file" in wrong


def test_stages_are_timed_unless_an_earlier_run_had_finished_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Resumed:
        """A job of which all that comes before the plans is done, and each of whose other stages takes two seconds."""

        graph, seconds = captured(), 1.0

        def __init__(self, job: Job, *rest: Any):
            print(TALK)
            self.store = Store(tmp_path, {}, resume=False)
            self.store.keep("operators", "a conv", [{"0.5": [[1.0], [2.0], 0.25]}])
            self.store.study("plans", beside="it")

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
    record = tune.tune(Job(named, "", "", (1,), "train", 3, 60.0, tmp_path / "c.json", 0, quiet=True))
    assert record.stage_s == {"operators": None, "plans": 2.0, "chunks": 2.0, "tiles": 2.0}
    assert record.samples == {"a conv": [{0.5: Passes([1.0], [2.0], 0.25)}]}
    assert record.studies == (Study("plans", "it", ()),)
    assert record.profile == ClusterProfile.load(tmp_path / "c.json") == profile()
    assert capsys.readouterr() == ("", TALK + "\n")


class Raced:
    """Rank 0's race, in which a device alone takes a second, and plans what ``seconds`` says by how they are cut."""

    def __init__(self, seconds: Callable[[Mapping[str, Split]], float | None]):
        self.seconds = seconds

    def lead(self, order: Order, enough: Callable[[Any], bool] = lambda _: False) -> Outcome:
        took = {n: 1.0 if isinstance(way, Alone) else self.seconds(way.splits) for n, way in order.ways.items()}
        if None in took.values():
            raise TrialFailedError("on rank 1: there is no more memory")
        return Outcome([took] * order.rounds, (1.0, 1.0), (0.0, 0.0), (1.0, 1.0))  # type: ignore[list-item]


def studied(
    folder: Path, seconds: Callable[[Mapping[str, Split]], float | None], link: str = "host"
) -> tuple[TunedPlan | None, tuple[Study, ...], list[str]]:
    """What the stage of plans finds, its studies, and what it says."""
    lines: list[str] = []
    say = SimpleNamespace(stage=lambda *_: None, advance=lambda *_: None, line=lines.append)
    graph, store = captured(), Store(folder, {}, resume=False)
    run: Any = SimpleNamespace(
        graph=graph, job=SimpleNamespace(mode="train", seed=0, budget=100.0, trials=0), spent=0.0, store=store, say=say,
        race=Raced(seconds), x=torch.zeros(2, 4, 16, 16), device=torch.device("cpu"), on_gpu=False,
        passed=lambda part: lambda: False, known=lambda *_: None, keep=lambda *_: None,
    )  # fmt: skip
    found = _Plans(run, ClusterProfile.from_devices(PAIR, link=link)).found().plan
    return found, studies_of(store), lines


def even(splits: Mapping[str, Split]) -> bool:
    cut = [split for split in splits.values() if split.kind != "replicate"]
    return all(max(split.sizes) - min(split.sizes) <= 1 for split in cut)


FIELD = "uneven height split", "even split by sample"


def test_the_even_split_is_measured_beside_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "near", lambda found, *_: [c for c in found if c.name in FIELD])
    found, studies, _ = studied(tmp_path, lambda splits: 3.0 if even(splits) else 0.5)
    assert found is not None
    assert (found.step_s, found.alone_s, found.even_s) == (0.5, 1.0, 3.0)
    assert (found.name, found.even, found.trials) == (*FIELD, 2)
    assert [(s.title, s.beside) for s in studies] == [("plans", found.alone)]
    assert {t.what: t.value for t in studies[0].trials} == dict(zip(FIELD, (0.5, 3.0), strict=True))


def test_an_even_split_that_fails_spoils_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "near", lambda found, *_: [c for c in found if c.name in FIELD])
    found, studies, lines = studied(tmp_path, lambda splits: None if even(splits) else 0.5)
    assert found is not None
    assert (found.step_s, found.alone_s, found.even, found.even_s) == (0.5, 1.0, None, None)
    assert [(t.what, t.value, t.why) for t in studies[0].trials if t.value is None] == [
        (FIELD[1], None, "on rank 1: there is no more memory")
    ]
    assert any("beside an even split failed on rank 1: there is no more memory" in line for line in lines)
    assert not any("side by side" in line for line in lines)  # who failed does not race again


def test_a_device_alone_that_nothing_comes_near_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "near", lambda found, *_: [])
    found, studies, _ = studied(tmp_path, lambda splits: 3.0)
    assert found is not None
    assert found.name == found.alone
    assert (found.step_s, found.alone_s, found.even_s, found.trials) == (1.0, 1.0, 3.0, 0)
    assert studies == ()


def test_studies_of_a_database_are_those_of_the_job_since_it_began(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/trials.db"

    def store(resume: bool, seed: int = 0) -> Store:
        folder = tmp_path / str(seed)
        folder.mkdir(exist_ok=True)
        return Store(folder, {"seed": seed}, resume=resume, url=url)

    store(False, seed=1).study("ratio", beside="another job's")
    store(False).study("plans 0", "plans", "it")
    store(True).study("plans 1", "plans", "it")
    assert studies_of(store(True)) == (Study("plans", "it", ()),) * 2
    assert studies_of(store(True, seed=1)) == (Study("ratio", "another job's", ()),)
    assert studies_of(store(False)) == ()


def test_an_even_split_is_known_under_the_name_of_a_plan_that_equals_it() -> None:
    graph, alike = captured(), ClusterProfile.from_devices(("cpu", "cpu"), link="host")
    whole = Candidates(graph, alike, "train").whole_models()
    found = contenders(graph, alike)
    known = [c._replace(name="another") if even(c.splits) else c for c in found]
    asked: Sequence[Any] = known
    best = even_split(whole, asked)
    assert best is not None
    assert best[0].startswith(EVEN)
    assert best[1].name == "another"
    assert best[1].predicted.step_s == min(c.predicted.step_s for c in known if c.splits in whole_even(whole))
    assert even_split(whole, []) is None


def whole_even(whole: Mapping[str, Any]) -> list[Any]:
    return [splits for name, splits in whole.items() if name.startswith(EVEN)]
