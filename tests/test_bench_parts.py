"""`bench parts`: its cases, its contenders, its arithmetic, and a run without a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import gpu, kernel_checks, parts, parts_cases, report, timing, verdict
from bench.kernel_checks import Error
from bench.parts_cases import CONTENDERS, RIVALS, Case, Inputs
from hetconv.errors import KernelError
from hetconv.kernels import segments
from hetconv.kernels.correlate import by_pointers
from hetconv.kernels.gather_concat import concat

from .test_segments import launching

CPU = torch.device("cpu")
MACHINE = {"device": "NVIDIA X1", "l2_bytes": 1 << 15}
CEILINGS = {"bf16": 800e12, "fp16": 800e12, "tf32": 400e12, "copy": 4e12}
SMALL = Case((16, 8, 24), 32, 3, 5, 2, "bf16")
FLAT = Case((12, 20), 16, 1, 6, 1, "fp16")


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parts.add_arguments(parser)
    return parser.parse_args(arguments)


def test_cases_are_distinct_convolutions_of_uneven_parts_that_keep_the_image() -> None:
    found = parts_cases.cases()
    assert len({c.name for c in found}) == len(found)
    for c in found:
        assert len(set(c.widths)) > 1
        assert sum(c.widths) == c.conv.spec.C in (64, 128, 256)
        assert c.conv.spec.y_shape == (c.N, c.K, c.size, c.size)
        assert c.conv.spec.bytes <= 1 << 30
    assert {c.kernel for c in found} == {1, 3}
    assert {(c.size, c.N) for c in found} == {(56, 32), (28, 32), (128, 1), (512, 1)}
    assert {c.dtype for c in found} == {"bf16", "fp16", "tf32"}
    assert {len(c.widths) for c in found} == {2, 3, 8}
    assert [c.name for c in found if any(w % 8 for w in c.widths)] == [
        "3x3 100+156-256 @56 N32 bf16", "1x1 100+156-256 @56 N32 bf16"
    ]  # fmt: skip


def test_the_quick_cases_have_every_filter_dtype_and_count() -> None:
    quick, found = parts_cases.quick(), parts_cases.cases()
    assert set(quick) <= set(found)
    assert len(set(quick)) == len(quick) <= 12
    for figure in (lambda c: c.kernel, lambda c: c.dtype, lambda c: len(c.widths), lambda c: sum(c.widths)):
        assert {figure(c) for c in quick} == {figure(c) for c in found}
    assert {c.kernel for c in quick[:2]} == {1, 3}


KERNELS: dict[str, list[Any]] = {
    "parts": [segments.by_segments], "joined": [], "joined by triton": [concat, by_pointers],
}  # fmt: skip


@pytest.mark.parametrize("name", CONTENDERS)
def test_who_computes_a_contender(name: str) -> None:
    """On a CPU ATen joins what nobody in particular is asked for."""
    with launching() as seen:
        CONTENDERS[name](FLAT, parts_cases.drawn(FLAT, CPU))
    assert [kernel for kernel, _ in seen] == KERNELS[name]


@contextmanager
def spoilt(name: str, number: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The last number that a contender computes is another."""
    contender = CONTENDERS[name]

    def bad(case: Case, t: Inputs) -> Tensor:
        y = contender(case, t).clone()
        y[-1, -1, -1, -1] = number
        return y

    with monkeypatch.context() as m:
        m.setitem(CONTENDERS, name, bad)
        yield


@pytest.mark.parametrize("case", [SMALL, FLAT, Case((8, 24), 16, 3, 4, 1, "tf32")], ids=lambda c: c.name)
def test_all_contenders_compute_the_convolution(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a spoilt number of any would be noticed, whether among the samples that float64 has time for or not."""
    torch.manual_seed(0)
    t = parts_cases.drawn(case, CPU)
    assert [tuple(p.shape) for p in t.parts] == [(case.N, c, case.size, case.size) for c in case.widths]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in t.parts)
    assert torch.cat(t.parts, 1).equal(t.x)
    found = parts_cases.errors(case, t)
    assert list(found) == [f"{name}, {other}" for name in CONTENDERS for other in ("float64", "cudnn")]
    assert parts_cases.wrong(case, found) == {}
    for name in CONTENDERS:
        with spoilt(name, 20.0, monkeypatch):
            found = parts_cases.errors(case, t)
            assert list(parts_cases.wrong(case, found)) == [f"{name}, float64", f"{name}, cudnn"]
    with spoilt("parts", float("nan"), monkeypatch):
        monkeypatch.setattr(parts_cases, "EXACT_FLOPS", 1.0)  # suffices for the first sample
        assert "parts, cudnn" in parts_cases.wrong(case, parts_cases.errors(case, t))


def test_what_a_contender_leaves_unwritten_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    t, right = parts_cases.drawn(SMALL, CPU), CONTENDERS["joined"]

    def unwritten(case: Case, t: Inputs) -> Tensor:
        y = right(case, t)
        new = torch.empty(1 << 24)  # too large for memory that was used before
        return y.where(~new[: y.numel()].view_as(y).isnan(), torch.nan)

    monkeypatch.setitem(CONTENDERS, "parts", unwritten)
    assert list(parts_cases.wrong(SMALL, parts_cases.errors(SMALL, t))) == ["parts, float64", "parts, cudnn"]


def test_limits_are_of_the_dtype_and_twice_as_large_against_cudnn() -> None:
    norm, worst = kernel_checks.LIMITS["fp16"]
    more = Error(1.5 * norm, worst)
    assert parts_cases.wrong(FLAT, {"parts, float64": more, "parts, cudnn": more}) == {"parts, float64": more}
    assert parts_cases.wrong(SMALL, {"parts, float64": more}) == {}
    assert parts_cases.wrong(FLAT, {"parts, cudnn": Error(norm, 3 * worst)})


@pytest.mark.parametrize("rivals", [("b",), ("b", "c")])
def test_the_first_is_raced_against_all_others_and_its_ratio_is_to_the_nearest(
    rivals: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "seconds", lambda run: run())
    lasts = {"a": iter((1.0, 2.0, 4.0)), "b": iter((3.0, 3.0, 8.0)), "c": iter((2.0, 2.0, 3.0))}
    timed = {name: timing.Timed(lambda n=name: next(lasts[n]), 1, "graph") for name in ("a", *rivals)}
    found = timing.raced(timed, 3)
    b, c = {"ratio": 2.0, "least": 1.5, "most": 3.0}, {"ratio": 1.0, "least": 0.75, "most": 2.0}
    assert (found["a_us"], found["b_us"], found["mode"]) == (2e6, 3e6, "graph")
    assert {k: found[k] for k in b} == (c if "c" in rivals else b)
    assert found.get("against") == ({"b": b, "c": c} if "c" in rivals else None)


def row(name: str, kernel: int, joined: float, by_triton: float) -> dict[str, Any]:
    ratios = {"joined": joined, "joined by triton": by_triton}
    times = {"parts_us": 10.0} | {f"{n}_us": 10 * r for n, r in ratios.items()}
    against = {n: {"ratio": r, "least": r, "most": r} for n, r in ratios.items()}
    found = {"name": name, "kernel": kernel, **times, "of_bound": 0.5, "mode": "graph", "against": against}
    return found | {"ratio": min(ratios.values())}


def test_cases_come_to_a_geometric_mean_over_each_rival_and_the_worst(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("a", 3, 2.0, 1.0), row("b", 3, 0.5, 1.5), row("c", 1, 1.25, 1.1)]
    rows.append({"name": "d", "kernel": 1, "failed": "out of registers"})
    found = {(g["against"], g["filters"]): g for g in parts.summary(rows)}
    assert list(found) == [(rival, sizes) for rival in RIVALS for sizes in ((3, 1), (3,), (1,))]
    three = found["joined", (3,)]
    assert (three["geomean"], three["least"], three["most"], three["cases"]) == (pytest.approx(1.0), 0.5, 2.0, 2)
    assert found["joined", (3, 1)]["geomean"] == pytest.approx(1.25 ** (1 / 3))
    assert found["joined by triton", (1,)]["geomean"] == pytest.approx(1.1)
    run = report.Report("parts", parts.verdict, parts.line, CPU, MACHINE, rows=rows)
    assert run.document()["worst"] == "b"
    with pytest.raises(SystemExit, match="1"):
        run.end(parts._verdict_lines(rows))
    *lines, _ = capsys.readouterr().out.splitlines()
    assert lines[1] == "3 of 4 timed"
    assert lines[2].endswith("failed: out of registers")
    assert lines[4] == "joined           over parts, 3x3         1.00x (0.50 to 2.00, 2 cases)"
    assert lines[-1].startswith("worst: b ")
    assert lines[-1].endswith(
        "parts     10.0 us,  50% of the bound, joined      5.0: 0.50x, joined by triton     15.0: 1.50x"
    )
    assert parts.summary([]) == []


def test_what_was_found_is_in_the_file_after_every_case(tmp_path: Path) -> None:
    """And a case that fails does not take the others with it."""
    run = report.Report("parts", parts.verdict, lambda r: r["name"], CPU, MACHINE, tmp_path / "x" / "found.json")

    def measure() -> dict[str, Any]:
        if not run.rows:
            raise RuntimeError("out of registers")
        written = json.loads((tmp_path / "x" / "found.json").read_text())
        return {"before": [r["name"] for r in written["cases"]]}

    run.fill(({"name": name}, measure) for name in "abc")
    assert run.rows == [
        {"name": "a", "failed": "RuntimeError: out of registers"},
        {"name": "b", "before": ["a"]},
        {"name": "c", "before": ["a", "b"]},
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(KernelError, match="bench parts needs a CUDA device"):
        parts.run(parsed())


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`parts.run` on two small cases, on a clock that gives every call 2 microseconds."""

    def prepared(call: Any, sets: int, least: float) -> timing.Timed:
        found = [call(i) for i in range(sets)]
        assert all(torch.isfinite(y).all() for y in found)
        assert len(found) > 1
        assert not found[0].equal(found[1])
        assert least in [c.conv.spec.bytes / CEILINGS["copy"] for c in (SMALL, FLAT)]
        return timing.Timed(lambda: None, 1, "loop")

    for where, name, value in (
        (parts, "need_cuda", lambda name: CPU), (parts, "facts", lambda: dict(MACHINE)),
        (parts, "ceilings", lambda device: dict(CEILINGS)), (report, "host_seconds", lambda call: 1e-5),
        (parts, "prepared", prepared), (parts_cases, "quick", lambda: [SMALL, FLAT]),
        (timing, "seconds", lambda run: 2e-6), (torch.backends.cudnn, "benchmark", False),
    ):  # fmt: skip
        monkeypatch.setattr(where, name, value)


@pytest.mark.usefixtures("without_gpu")
def test_a_run_measures_every_case_and_writes_it_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x" / "2026-01-02-parts.json"
    parts.run(parsed("--quick", "-o", str(file)))
    document = json.loads(file.read_text())
    assert [r["name"] for r in document["cases"]] == ["3x3 16+8+24-32 @5 N2 bf16", "1x1 12+20-16 @6 N1 fp16"]
    for r, case in zip(document["cases"], (SMALL, FLAT), strict=True):
        assert tuple(r["widths"]) == case.widths
        assert {n: a["ratio"] for n, a in r["against"].items()} == dict.fromkeys(RIVALS, 1.0)
        assert all(r[f"{n}_us"] == pytest.approx(2.0) for n in CONTENDERS)
        assert r["of_bound"] == pytest.approx(case.conv.spec.bytes / CEILINGS["copy"] / 2e-6)
    assert (document["suite"], document["device"], document["ceilings"]) == ("parts", "NVIDIA X1", CEILINGS)
    assert list(document["host_us"]) == list(CONTENDERS)
    assert len(document["summary"]) == 6
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {k: v for k, v in document.items() if k != "cases"}
    assert any(text.startswith(SMALL.name) and text.endswith("1.00x  (loop)") for text in lines)
    assert "2 of 2 timed" in lines


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("name", CONTENDERS)
def test_a_wrong_result_has_no_time_and_fails_the_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with spoilt(name, 20.0, monkeypatch), pytest.raises(SystemExit, match="1"):
        parts.run(parsed("--quick"))
    *lines, last = capsys.readouterr().out.splitlines()
    assert sum("WRONG" in text and f"{name}, float64" in text for text in lines) == 4
    rows = json.loads(last)["cases"]
    assert verdict.timed(rows) == []
    assert all(r["wrong"] and r["errors"] for r in rows)


@pytest.mark.usefixtures("without_gpu")
def test_a_budget_stops_a_run_with_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    parts.run(parsed("--quick", "--budget", "0"))
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["stopped"], document["cases"], document["summary"]) == ("after the budget of 0 s", [], [])
    assert document["worst"] is None


def test_it_is_a_stage_of_bench_gpu_before_the_convolutions(tmp_path: Path) -> None:
    found = gpu.stages(tmp_path)
    names = [s.name for s in found]
    stage = found[names.index("parts read in place")]
    assert names.index(stage.name) < names.index("kernels against cuDNN")
    assert stage.command[:4] == ("-m", "bench", "parts", "--quick")
    assert any(c.startswith(str(tmp_path)) and c.endswith("-parts.json") for c in stage.command)
