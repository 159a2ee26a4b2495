"""`bench concat`: its cases, its contenders, its arithmetic, and a run without a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.concat import suite as concat
from bench.concat import works as concat_works
from bench.concat.works import (
    CHANNELS,
    EXACT,
    LIMITS,
    MEGABYTES,
    SIZES,
    WORKS,
    Case,
)
from bench.shared import report, timing
from hetconv.errors import KernelError

CPU = torch.device("cpu")
MACHINE = {"device": "NVIDIA X1", "l2_bytes": 4096}
CEILINGS = {"bf16": 800e12, "fp16": 800e12, "tf32": 400e12, "copy": 4e12}
SMALL = Case(3, 1, "bf16")


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    concat.add_arguments(parser)
    return parser.parse_args(arguments)


def test_cases_are_uneven_parts_of_exactly_so_many_bytes() -> None:
    found = concat_works.cases()
    assert len({c.name for c in found}) == len(found) == 60
    for sizes in SIZES.values():
        assert sum(sizes) == CHANNELS
        assert len(set(sizes)) > 1
        assert all(k % 8 == 0 for k in sizes)
    for c in found:
        itemsize = concat_works.DTYPES[c.dtype].itemsize
        assert (
            c.samples * 32 * 32 * CHANNELS * itemsize
            == c.result_bytes
            == c.megabytes * 2**20
        )
        assert [c.moved_bytes(w) // c.result_bytes for w in WORKS] == [2, 2, 2, 3]


def test_the_quick_cases_have_every_size_dtype_and_count_and_what_must_hold() -> None:
    quick = concat_works.quick()
    assert set(quick) <= set(concat_works.cases())
    assert len(set(quick)) == len(quick)
    assert {c.megabytes for c in quick} == set(MEGABYTES)
    assert {c.dtype for c in quick} == set(concat_works.DTYPES)
    assert {c.parts for c in quick} == set(SIZES)
    assert all(
        d.value is not None
        for d in concat.demands([row(c.megabytes, w) for c in quick for w in WORKS])
    )


def row(
    megabytes: int, work: str, ratio: float = 3.0, of_copy: float = 0.9
) -> dict[str, Any]:
    return {
        "name": "x",
        "work": work,
        "megabytes": megabytes,
        "ratio": ratio,
        "of_copy": of_copy,
    }


def test_what_must_hold_is_of_the_worst_case() -> None:
    rows = [row(64, w) for w in WORKS] + [
        row(512, "concat", 0.99, 0.84),
        row(1, "finished", 1.5, 0.1),
    ]
    rows.append(
        {"name": "y", "work": "adjoint", "megabytes": 64, "failed": "out of registers"}
    )
    held = {d.text: (d.value, d.met) for d in concat.demands(rows)}
    assert held == {
        "concat, of torch.cat's speed, any size": (0.99, False),
        "finished, of torch.cat, batch norm and ReLU's speed, any size": (1.5, False),
        "concat, of the copy's bandwidth, 64 MB and more": (0.84, False),
        "finished, of the copy's bandwidth, 64 MB and more": (0.9, True),
        "adjoint, of the copy's bandwidth, 64 MB and more": (0.9, True),
        "finished adjoint, of the copy's bandwidth, 64 MB and more": (0.9, True),
    }
    assert all(d.met is None for d in concat.demands([]))


@pytest.mark.parametrize("what", WORKS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_both_contenders_compute_the_work(what: Any, dtype: str) -> None:
    """And a spoilt number of either would be noticed."""
    case = Case(8, 1, dtype)
    t = concat_works.drawn(case, what, CPU)
    for contender in (concat_works.by_triton, concat_works.by_torch):
        found = contender(what, case, t)
        assert all(v.is_contiguous(memory_format=torch.channels_last) for v in found)
        assert concat_works.worst_error(what, case, t, found).within(
            LIMITS[dtype] if "finished" in what else EXACT
        )
        found[-1][-1, -1, -1, -1] = 20
        assert not concat_works.worst_error(what, case, t, found).within(LIMITS[dtype])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(KernelError, match="bench concat needs a CUDA device"):
        concat.run(parsed())


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`concat.run` on one small case, by torch on both sides, on a clock that gives
    every call 2 microseconds.
    """

    def prepared(call: Any, sets: int, least: float) -> timing.Timed:
        assert all(torch.isfinite(v).all() for i in range(sets) for v in call(i))
        assert least >= 2 * SMALL.result_bytes / CEILINGS["copy"]
        return timing.Timed(lambda: None, 1, "loop")

    for where, name, value in (
        (concat, "need_cuda", lambda name: CPU),
        (concat, "facts", lambda: dict(MACHINE)),
        (concat, "ceilings", lambda device: dict(CEILINGS)),
        (report, "host_seconds", lambda call: 1e-5),
        (concat, "prepared", prepared),
        (concat, "quick", lambda: [SMALL]),
        (timing, "seconds", lambda run: 2e-6),
        (concat, "by_triton", concat_works.by_torch),
    ):
        monkeypatch.setattr(where, name, value)


@pytest.mark.usefixtures("without_gpu")
def test_a_run_measures_every_work_and_writes_it_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x" / "concat.json"
    concat.run(parsed("--quick", "-o", str(file)))
    document = json.loads(file.read_text())
    assert [(r["name"], r["work"]) for r in document["cases"]] == [
        ("3 parts, 1 MB, bf16", w) for w in WORKS
    ]
    for r in document["cases"]:
        assert r["ratio"] == 1.0
        assert r["bytes_per_s"] == pytest.approx(SMALL.moved_bytes(r["work"]) / 2e-6)
        assert r["of_copy"] == pytest.approx(r["bytes_per_s"] / CEILINGS["copy"])
    assert (document["suite"], document["device"], document["copy_bytes_per_s"]) == (
        "concat",
        "NVIDIA X1",
        4e12,
    )
    assert [d["met"] for d in document["must_hold"]] == [
        True,
        False,
        None,
        None,
        None,
        None,
    ]
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {k: v for k, v in document.items() if k != "cases"}
    assert any(
        "3 parts, 1 MB, bf16" in text and "1.00x  (loop)" in text for text in lines
    )


@pytest.mark.usefixtures("without_gpu")
def test_a_wrong_result_has_no_time_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        concat, "by_triton", lambda *a: [v * 2 for v in concat_works.by_torch(*a)]
    )
    with pytest.raises(SystemExit, match="1"):
        concat.run(parsed("--quick"))
    lines = capsys.readouterr().out.splitlines()
    assert sum("WRONG" in text for text in lines) == 2 * len(WORKS)
    assert all("ratio" not in r and r["wrong"] for r in json.loads(lines[-1])["cases"])


@pytest.mark.usefixtures("without_gpu")
def test_a_budget_stops_a_run_with_what_it_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    concat.run(parsed("--quick", "--budget", "0"))
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["stopped"], document["cases"]) == ("after the budget of 0 s", [])
