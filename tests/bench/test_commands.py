"""The kernel benchmark's cases, checks and arithmetic: what can be wrong before a GPU
has run them.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import suite as gpu
from bench.kernels import cases as kernel_cases
from bench.kernels import checks as kernel_checks
from bench.kernels import suite as kernels
from bench.kernels.cases import PASSES, Case
from bench.shared import machine, readme, timing, verdict
from hetconv.errors import HetConvError, KernelError
from hetconv.kernels.chip import CHIPS

CASES = kernel_cases.cases()
CEILINGS = {"bf16": 800e12, "fp16": 800e12, "tf32": 400e12, "copy": 4e12}
MACHINE = {"device": "NVIDIA X1", "l2_bytes": 4096} | {
    "date": "2026-01-02T03:04:05+00:00",
    "torch": "2.11",
    "triton": "3.6",
}
CPU = torch.device("cpu")
TINY = Case("tiny", 3, 16, 6, 5, 32, 3, 3, 2, 1, 1, "bf16", "K", 32)


def parsed(module: Any, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(arguments)


def test_cases_are_distinct_and_within_the_budget() -> None:
    names = [c.name for c in CASES]
    assert len(set(names)) == len(names)
    assert max(c.spec.bytes for c in CASES) <= kernel_cases.MAX_BYTES
    small = kernel_cases.cases(10 << 20)
    assert small
    assert max(c.spec.bytes for c in small) <= 10 << 20


def test_cases_are_whole_layers_and_aligned_slices_of_them() -> None:
    for c in CASES:
        assert min(c.spec.P, c.spec.Q) >= 1
        assert c.K % 16 == 0
        assert c.is_slice == (c.part != "K")
        assert c.spec.y_shape == (c.N, c.K, -(-c.H // c.stride), -(-c.W // c.stride))
    whole = {c.name: c for c in CASES}
    assert whole["unet 320-320 3x3 @64 N1 fp16 3K/4"].K == 240
    assert whole["dilated 512-512 3x3 d2 @28 N256 tf32 160"].spec.dilation == (2, 2)


def test_the_quick_subset_has_every_pass_slices_and_what_must_hold() -> None:
    quick = kernel_cases.quick()
    names = {c.name for c in quick}
    assert len(names) == len(quick)
    assert names <= {c.name for c in CASES}
    wanted = len(kernel_cases.QUICK) + 2 * len(kernel_cases.QUICK_SLICES)
    assert len(quick) == wanted + len(kernel_cases.QUICK_FP16) + len(
        kernel_cases.QUICK_ALONE
    )
    rows = [row(c.name, what, 1.0, c.part, c.dtype) for c in quick for what in c.passes]
    assert all(d.value is not None for d in verdict.demands(rows, CEILINGS))


@pytest.mark.parametrize("what", PASSES)
def test_every_quick_case_has_tiles(what: Any) -> None:
    for case in kernel_cases.quick():
        found = kernel_checks.tiles_of(case, what, CHIPS[90])
        assert len(set(found)) == len(found) > 1


def test_selection_by_name_and_pass() -> None:
    found = kernels.selected(
        parsed(
            kernels,
            "--quick",
            "--filter",
            "N1 .*K$",
            "--passes",
            "weight gradient, forward",
        )
    )
    assert {c.N for c, _ in found} == {1}
    assert {p for _, p in found} == {"forward", "weight gradient"}
    for arguments, said in (
        (("--passes", "forwards"), "is not known"),
        (("--filter", "("), "no regular"),
        (("--filter", "zzz"), "no case"),
    ):
        with pytest.raises(KernelError, match=said):
            kernels.selected(parsed(kernels, *arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("name", "module"), [("kernels", kernels), ("gpu", gpu)])
def test_without_a_gpu_benchmarks_say_so(name: str, module: Any) -> None:
    with pytest.raises(KernelError, match=f"bench {name} needs a CUDA device"):
        module.run(parsed(module))


def row(
    name: str, what: str, ratio: float, part: str = "K", dtype: str = "bf16"
) -> dict[str, Any]:
    return {
        "name": name,
        "pass": what,
        "part": part,
        "dtype": dtype,
        "ratio": ratio,
    } | {
        "flops_per_s": 600e12,
        "bytes_per_s": 3e12,
        "of_bound": 0.75,
        "bound": "matmul",
        "triton_us": 10.0,
        "cudnn_us": 10.0 * ratio,
        "mode": "graph",
    }


ROWS = [
    row("vgg16 256-256 3x3 @56 N32 bf16 K", "forward", 2.0),
    row("a", "forward", 0.5),
    row("b", "forward", 1.21, part="K/4"),
    row("c", "forward", 0.1, dtype="tf32"),
    row("d", "weight gradient", 0.81, dtype="fp16"),
    {"name": "e", "pass": "forward", "part": "K", "dtype": "bf16", "wrong": "NaN"},
]


def test_summary_is_the_geometric_mean_of_what_was_timed() -> None:
    found = {(g["pass"], g["part"], g["dtype"]): g for g in verdict.summary(ROWS)}
    assert len(found) == 4
    whole = found["forward", "K", "bf16"]
    assert (whole["geomean"], whole["least"], whole["most"], whole["cases"]) == (
        pytest.approx(1.0),
        0.5,
        2.0,
        2,
    )
    assert verdict.geomean([]) is None
    assert [r["name"] for r in verdict.worst(ROWS, 2)] == ["c", "a"]


def test_demands_are_judged_on_half_precision_alone() -> None:
    found = verdict.demands(ROWS, CEILINGS)
    values = [d.value for d in found]
    assert values == [
        pytest.approx(v) if v is not None else None
        for v in (1.0, 1.21, 0.5, None, 0.81, 0.75, None)
    ]
    assert [d.met for d in found] == [True, True, False, None, False, True, None]
    assert "MISSED" in str(found[2])
    assert str(found[3]).startswith("not measured")


@pytest.mark.parametrize("what", PASSES)
def test_checks_pass_what_is_right_and_find_what_is_wrong(
    what: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernel_checks,
        "by_triton",
        lambda case, p, t, tile=None: kernel_checks.by_aten(case, p, t),
    )
    t = kernel_checks.drawn(TINY, what, CPU)
    other = kernel_checks.by_aten(TINY, what, t)
    assert not kernel_checks.is_wrong(TINY, kernel_checks.errors(TINY, what, t, other))
    for spoilt in (float("nan"), 2.0 * float(other.abs().max())):
        bad = other.clone()
        bad[-1, -1, -1, -1] = spoilt
        assert kernel_checks.is_wrong(TINY, kernel_checks.errors(TINY, what, t, bad))
        monkeypatch.setattr(kernel_checks, "by_triton", lambda *a, y=bad: y)
        assert kernel_checks.is_wrong(TINY, kernel_checks.errors(TINY, what, t, other))
        monkeypatch.setattr(
            kernel_checks,
            "by_triton",
            lambda case, p, t, tile=None: kernel_checks.by_aten(case, p, t),
        )


def test_what_a_result_leaves_unwritten_is_nan_within_a_check() -> None:
    with kernel_checks.poisoned():
        assert torch.empty(8, 4, dtype=torch.bfloat16).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`kernels.run` on two small cases, by ATen on both sides, on a clock of its own;
    what Triton was asked for.
    """
    asked: list[str] = []

    def by_triton(
        case: Case, what: Any, t: Any, tile: Any = None, out: Any = None
    ) -> Any:
        asked.append(f"{what} {tile or 'default'}{' into a slot' * (out is not None)}")
        return kernel_checks.by_aten(case, what, t, out)

    def prepared(call: Any, sets: int, least: float) -> timing.Timed:
        assert all(torch.isfinite(call(i)).all() for i in range(sets))
        return timing.Timed(lambda: None, 1, "loop")

    part = replace(TINY, name="slice", K=16, part="K/2")
    for where, name, value in (
        (kernels, "need_cuda", lambda name: CPU),
        (kernels, "facts", lambda: dict(MACHINE)),
        (kernels, "ceilings", lambda device: dict(CEILINGS)),
        (kernels, "host_seconds", lambda call: 1e-5),
        (kernels, "_is_alive", lambda: True),
        (kernels, "checks_in_processes", lambda: nullcontext(len)),
        (kernels, "prepared", prepared),
        (kernels, "by_triton", by_triton),
        (kernel_checks, "by_triton", by_triton),
        (kernel_cases, "quick", lambda: [TINY, part]),
        (timing, "seconds", lambda run: 2e-6),
        (torch.backends.cudnn, "benchmark", False),
    ):
        monkeypatch.setattr(where, name, value)
    return asked


def test_a_run_measures_every_pass_and_writes_it_down(
    without_gpu: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x" / "kernels.json"
    kernels.run(parsed(kernels, "--quick", "-o", str(file)))
    document = json.loads(file.read_text())
    assert [(r["name"], r["pass"]) for r in document["cases"]] == [
        (n, p) for n in ("tiny", "slice") for p in PASSES
    ]
    assert all(r["ratio"] == 1.0 for r in document["cases"])
    assert ["slot" in r for r in document["cases"]] == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]
    assert "forward default into a slot" in without_gpu
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == {k: v for k, v in document.items() if k != "cases"}
    assert "| forward | K/2 | bf16 | 1 | 1.00×" in readme.kernels(tmp_path)


def test_a_wrong_case_has_no_time_and_fails_the_run(
    without_gpu: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        kernel_checks,
        "by_triton",
        lambda case, what, t, *a: kernel_checks.by_aten(case, what, t) * 2,
    )
    with pytest.raises(SystemExit, match="1"):
        kernels.run(parsed(kernels, "--quick", "--passes", "forward"))
    lines = capsys.readouterr().out.splitlines()
    assert any(text.startswith("tiny") and "WRONG" in text for text in lines)
    assert all("ratio" not in r and r["wrong"] for r in json.loads(lines[-1])["cases"])


def test_a_budget_stops_a_run_with_what_it_has(
    without_gpu: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.run(parsed(kernels, "--quick", "--budget", "0"))
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["stopped"], document["cases"]) == ("after the budget of 0 s", [])


def test_a_case_that_fails_is_a_row_that_says_so() -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("out of\nregisters")

    found = kernels.attempted(TINY, "forward", fail)
    assert found["failed"] == "RuntimeError: out of registers"
    assert "failed: RuntimeError" in kernels.line(found)
    assert verdict.timed([found]) == []
    json.dumps(found)


def test_results_are_filed_by_device_and_suite(tmp_path: Path) -> None:
    assert machine.slug("NVIDIA H200") == "nvidia-h200"
    assert machine.results_file(tmp_path, "kernels") == tmp_path / "kernels.json"


def test_the_readme_shows_the_results_of_each_gpu(tmp_path: Path) -> None:
    report = kernels.Report(
        tmp_path / "nvidia-x1" / "kernels.json", CPU, MACHINE, CEILINGS
    )
    report.rows = ROWS
    report.write()
    text = readme.kernels(tmp_path)
    assert "NVIDIA X1 (2026-01-02, torch 2.11" in text
    assert "| forward | K/4 | bf16 | 1 | 1.21× | 1.21× | 1.21× |" in text
    assert "1 cases gave a wrong result" in text
    assert readme.kernels(tmp_path / "nothing") == readme.NOTHING


def test_every_case_of_a_pair_and_network_is_shown(tmp_path: Path) -> None:
    case = {
        "pair": "cpu,cpu@0.5",
        "model": "ResNet-18",
        "mode": "train",
        "date": "2026-01-01T12:00:00+00:00",
        "chosen": "tuned plan",
        "median error": 0.034,
        "p90 error": 0.1,
        "median error of layers": 0.05,
        "of layers measured again": 0.02,
        "tau": 0.9,
        "tau of rounds": 0.95,
        "vs_alone": 1.3,
        "vs_even": 1.4,
        "possible vs_even": 1.5,
        "of computing": 1.08,
        "of no messages": 1.03,
        "regret": 0.01,
    }
    alone = case | {"mode": "infer", "chosen": "fastest device alone (0: cpu)"}
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "autotune.json").write_text(
        json.dumps({"cases": [case, alone]})
    )
    where = "| `cpu,cpu@0.5` | ResNet-18 |"
    figures = "3% | 10% | 5% (2%) | 0.90 (0.95) |"
    assert readme.predictions(tmp_path).splitlines()[2:] == [
        f"{where} inference | {figures} — | 1.40× (1.50) | — | — | 1% |",
        f"{where} training | {figures} 1.30× | 1.40× (1.50) | 1.08× | 1.03× | 1% |",
    ]


@pytest.mark.parametrize("table", readme.TABLES, ids=lambda table: table.name)
def test_tables_are_those_of_the_results(table: readme.Table) -> None:
    """`python -m bench readme` makes them so."""
    text = table.file.read_text(encoding="utf-8")
    assert table.updated(text) == text
    with pytest.raises(HetConvError, match="put them back"):
        table.updated("# no markers")
