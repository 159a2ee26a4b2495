"""The command line as a person uses it, with wrong arguments too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hetconv
from hetconv.autotune.cli import main
from hetconv.autotune.launch import launcher
from hetconv.autotune.launch.launcher import parse_devices
from hetconv.autotune.models.build import build_model
from hetconv.autotune.search import journal
from hetconv.autotune.search.journal import claimed
from hetconv.autotune.search.tune import tune
from hetconv.schemas.cluster_profile import ClusterProfile
from tests import ROOT

NET = ("--model", "tests.nets:SuperResolution", "--input", "1x3x128x128")
PAIR = ("--devices", "cpu,cpu@0.5")
Command = Callable[..., tuple[int, str, str]]


def hetconv_command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "160",
        "TERM": "dumb",
        "OMP_NUM_THREADS": "1",
    }
    env["XDG_DATA_HOME"] = str(
        cwd / "nothing"
    )  # where a profile of this machine's could be
    command = [sys.executable, "-m", "hetconv", *args]
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_the_road_from_devices_to_a_plan(tmp_path: Path, command: Command) -> None:
    tuned = hetconv_command(
        "autotune",
        *PAIR,
        *NET,
        "--trials",
        "2",
        "--budget",
        "12",
        "-o",
        "cluster.json",
        cwd=tmp_path,
    )
    assert tuned.returncode == 0, tuned.stderr
    assert "cpu@0.5 (emulated)" in tuned.stderr
    assert "operators, " in tuned.stderr
    assert "link 0-1" not in tuned.stderr
    profile = ClusterProfile.load(tmp_path / "cluster.json")
    assert profile.names == ("cpu", "cpu@0.5")
    assert not profile.estimated
    assert profile.devices[1].emulated
    assert all(
        x.measured for x in (*profile.devices, *profile.links.values(), *profile.tuned)
    )
    assert [d.identity.speed for d in profile.devices if d.identity] == [1, 0.5]
    # On a busy machine there may be no time for all three convolutions along two axes,
    # one device alone may measure fastest, or steps may vary too much to tell ratios
    # apart.
    measured = len(profile.devices[0].operators)
    assert measured == 6 or (
        0 < measured < 6 and "were left to the fitted roofline" in tuned.stderr
    )
    assert [t.mode for t in profile.tuned] == (
        ["train"] if "ms a step" in tuned.stderr else []
    )

    status, _, wrong = command(
        "plan", "--profile", "cluster.json", *NET, "--kinds", "height"
    )
    assert status == 0, wrong
    plan = hetconv.Plan.load(tmp_path / "plan.json")
    assert list(plan.splits) == ["head", "body", "tail"]
    assert {s.kind for s in plan.splits.values()} == {"height"}

    for file, words in (
        ("plan.json", ("body", "height", "MB moved")),
        ("cluster.json", ("emulated", "plan for train")),
    ):
        status, said, wrong = command("show", file)
        assert (status, wrong) == (0, "")
        assert all(w in said for w in words), said
    assert ("tuned train" in said) is bool(profile.tuned)
    status, said, wrong = command("show", "plan.json", "--gathers")
    assert (status, wrong) == (0, "")
    assert "no operator gathers" in said
    status, _, wrong = command("show", "cluster.json", "--gathers")
    assert status == 2
    assert "is a profile" in wrong


def test_a_plan_for_devices_that_nobody_has_says_so(
    tmp_path: Path, command: Command
) -> None:
    cluster = (
        "--devices",
        "2xV100-SXM2-32GB / T4",
        "--link",
        "nvlink2/pcie3-x16",
        "--between",
        "ethernet-100g",
    )
    status, said, wrong = command("plan", *cluster, *NET, "-o", "plan.json")
    assert status == 0, wrong
    assert "estimated from data sheets" in said
    assert "link nvlink2/pcie3-x16, between ethernet-100g" in said
    assert "body" in said  # the table has room for names beside the devices
    plan = hetconv.Plan.load(tmp_path / "plan.json")
    assert plan.estimated
    assert plan.devices == ("V100-SXM2-32GB", "V100-SXM2-32GB", "T4")

    profile = ClusterProfile.from_devices(
        cluster[1], link=cluster[3], between=cluster[5]
    )
    profile.save(tmp_path / "cluster.json")
    for file, words in (
        ("plan.json", ()),
        ("cluster.json", ("card of node 1, in: 12.50 GB/s",)),
    ):
        _, shown, _ = command("show", file)
        assert all(said in shown for said in ("estimated from data sheets", *words)), (
            shown
        )


def test_the_catalogue_is_listed_with_its_sources(command: Command) -> None:
    status, said, wrong = command("devices")
    assert status == 0, wrong
    rows = {
        words[0]: words[1:] for line in said.splitlines() if (words := line.split())
    }
    numbers = "80 2039 9.7 19.5 156 312 312".split()
    assert rows["A100-SXM4-80GB"][:-1] == numbers
    assert "A100 Tensor Core GPU data sheet" in " ".join(
        rows[rows["A100-SXM4-80GB"][-1]]
    )
    assert rows["T4"][:-1] == "16 320 0.254 8.1 - 65 -".split()
    assert rows["ethernet-100g"][:-1] == ["12.5", "50"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ("plan", *NET, "--devices", "T4", "--profile", "x.json"),
            "give one, measured or catalogued",
        ),
        (("plan", *NET, "--link", "nvlink3"), "name them with --devices"),
        (
            ("plan", *NET, "--devices", "T5"),
            "device 'T5' is not catalogued; choose one of V100",
        ),
        (("autotune", "--devices", "tpu", *NET), "device 'tpu' is not understood"),
        (("autotune", "--devices", "cpu,cpu@2", *NET), "device 'cpu@2'"),
        (
            ("autotune", *PAIR, "--model", "tests.nets", "--input", "1x3x8x8"),
            "write package.module:callable",
        ),
        (
            ("autotune", *PAIR, "--model", "nowhere:net", "--input", "1x3x8x8"),
            "module 'nowhere' cannot be imported",
        ),
        (
            ("autotune", *PAIR, "--model", "tests.nets:Missing", "--input", "1x3x8x8"),
            "has no 'Missing'",
        ),
        (("autotune", *PAIR, *NET[:2], "--input", "1x3xbig"), "is not a shape"),
        (("autotune", *PAIR, *NET, "--model-args", "{"), "is not JSON"),
        (
            ("autotune", *PAIR, *NET, "--model-args", '{"depth": 3}'),
            "cannot be called with",
        ),
        (
            ("autotune", *PAIR, *NET[:2], "--input", "1x4x8x8"),
            "cannot be called with --input of (1, 4, 8, 8): ",
        ),
        (("plan", *NET, "--profile", "none.json"), "none.json: cannot be read"),
        (("show", "none.json"), "none.json: cannot be read"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    args: tuple[str, ...], said: str, tmp_path: Path, command: Command
) -> None:
    status, _, wrong = command(*args)
    assert status == 2
    assert said in wrong
    assert "Traceback" not in wrong
    assert not list(tmp_path.iterdir())


def test_without_a_profile_on_this_machine_a_plan_is_refused(tmp_path: Path) -> None:
    done = hetconv_command("plan", *NET, cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no profile at" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def in_process(folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: Any) -> Any:
    """What comes of ``hetconv autotune`` where these are the ranks."""
    monkeypatch.setattr(launcher, "run_on", ranks)
    monkeypatch.delenv("RANK", raising=False)
    args = [
        *PAIR,
        *NET,
        "-o",
        str(folder / "cluster.json"),
        "--resume",
        "--storage",
        "sqlite:///trials.db",
    ]
    return CliRunner().invoke(main.app, ["autotune", *args])


def test_the_job_is_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    assert (
        in_process(tmp_path, monkeypatch, lambda *of: asked.append(of)).exit_code == 0
    )
    ((devices, fn, job),) = asked
    assert fn is tune
    assert devices == list(job.devices) == parse_devices("cpu,cpu@0.5")
    assert (job.resume, job.storage, job.mode) == (True, "sqlite:///trials.db", "train")


def test_ctrl_c_says_where_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    done = in_process(tmp_path, monkeypatch, interrupted)
    assert done.exit_code == 130
    (line,) = done.stderr.splitlines()
    assert (
        line
        == f"hetconv: interrupted; what was measured is in {tmp_path}/cluster.json.study.db: add "
        "--resume"
    )


def test_a_second_autotune_of_a_profile_is_refused_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_LOCK_WAIT_S", 0.0)
    with claimed(tmp_path / "cluster.json"):
        done = in_process(tmp_path, monkeypatch, lambda *_: pytest.fail("it starts"))
    assert isinstance(done.exception, hetconv.HetConvError)
    assert (
        f"is being written by another hetconv autotune (process {os.getpid()})"
        in str(done.exception)
    )


def test_models_are_read() -> None:
    model = build_model("tests.nets:Block", "[4, 8]", 0)
    assert model.conv1.weight.shape == (8, 4, 3, 3)
    again = build_model("tests.nets:Block", '{"c": 4, "k": 8}', 0)
    assert all(
        (a == b).all()
        for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    with pytest.raises(hetconv.HetConvError, match="not a torch"):
        build_model("json:loads", '["1"]', 0)


def test_a_plan_of_another_version_is_refused_by_name(
    tmp_path: Path, command: Command
) -> None:
    (tmp_path / "plan.json").write_text(
        json.dumps({"format": "hetconv-plan", "version": 7})
    )
    status, _, wrong = command("show", "plan.json")
    assert status == 2
    assert "version is 7" in wrong
