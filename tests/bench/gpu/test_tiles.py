"""`bench tiles`: what it studies, writes and fits."""

from __future__ import annotations

import argparse
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.kernels import checks as kernel_checks
from bench.kernels.cases import PASSES, Case, quick
from bench.shared import timing
from bench.tiles import fit, measured, study, suite
from hetconv.errors import KernelError
from hetconv.kernels.chip import CHIPS
from hetconv.kernels.tiles import Tile, default_tile

TINY = Case("tiny", 2, 16, 6, 6, 32, 3, 3, 1, 1, 1, "bf16", "K", 32)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    suite.add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_default_tile_is_studied_first_and_shapes_differ() -> None:
    (case, *_) = quick()
    for what in PASSES:
        found = study.candidates(case, what, CHIPS[90])
        (shape,) = kernel_checks.gemm_shapes(case, what)
        assert default_tile(shape, CHIPS[90]) == found[0]
        assert len(set(found)) == len(found) == study.TILES_PER_PASS
        assert len({(t.m, t.n, t.k, t.warps) for t in found}) >= 8
    shapes = kernel_checks.gemm_shapes
    phases = [(c, p) for c, p in study.studied() if len(shapes(c, p)) > 1]
    assert all(study.candidates(c, p, CHIPS[90]) for c, p in phases)


MACHINE = {"device": "made up", "torch": "2", "triton": "3", "l2_bytes": 1 << 16}


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def checks() -> Any:
        yield lambda problems: [None, "wrong: made up", *[None] * (len(problems) - 2)]

    def by_triton(case: Case, what: Any, t: Any, tile: Any = None) -> Any:
        if tile.m == 32:
            raise RuntimeError("too much")
        return kernel_checks.by_aten(case, what, t)

    def prepared(call: Any, sets: int, least: float) -> timing.Timed:
        assert all(torch.isfinite(call(i)).all() for i in range(sets))
        return timing.Timed(lambda: None, 1, "loop")

    for where, name, value in (
        (suite, "need_cuda", lambda name: torch.device("cpu")),
        (suite, "facts", lambda: dict(MACHINE)),
        (suite, "checks_in_processes", checks),
        (study, "quick", lambda: [TINY]),
        (measured, "cases", lambda: [TINY]),
        (study, "by_triton", by_triton),
        (study, "prepared", prepared),
        (timing, "seconds", lambda run: 2e-6),
    ):
        monkeypatch.setattr(where, name, value)


def test_a_run_times_tiles_of_every_pass(
    without_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiles.json"
    suite.run(parsed("-o", str(file)))
    document = json.loads(file.read_text())
    assert [r["pass"] for r in document["rows"]] == list(PASSES)
    for r in document["rows"]:
        found = list(r["tiles"].values())
        assert found[1] == {"wrong": "wrong: made up"}
        assert any(v == {"us": 2.0} for v in found)
        assert all(Tile.parse(tile) for tile in r["tiles"])
    assert any("failed" in v for r in document["rows"] for v in r["tiles"].values())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == document


def test_a_resumed_run_keeps_what_was_measured(
    without_gpu: None, tmp_path: Path
) -> None:
    file = tmp_path / "tiles.json"
    suite.run(parsed("-o", str(file)))
    document = json.loads(file.read_text())
    first, *_ = document["rows"]
    first["cudnn_us"] = 77.0
    file.write_text(json.dumps(document | {"rows": [first]}))
    suite.run(parsed("--resume", "-o", str(file)))
    rows = json.loads(file.read_text())["rows"]
    assert [r["pass"] for r in rows] == list(PASSES)
    assert [r["cudnn_us"] == 77.0 for r in rows] == [True, False, False]
    file.write_text(json.dumps(document | {"device": "another"}))
    with pytest.raises(KernelError, match=r"is of another.* give another --output"):
        suite.run(parsed("--resume", "-o", str(file)))
    with pytest.raises(KernelError, match="give it with --output"):
        suite.run(parsed("--resume"))


def test_what_was_measured_can_be_fitted(without_gpu: None, tmp_path: Path) -> None:
    file = tmp_path / "tiles.json"
    suite.run(parsed("-o", str(file)))
    passes = measured.load(file)
    assert [p.what for p in passes] == list(PASSES)
    assert not any(p.boxes for p in passes)
    assert fit.Data(passes).predicted(fit.Models(*[START] * 2)).min() > 0


START = fit.TimeModel(**{name: start for name, (start, _, _) in fit.BOUNDS.items()})


def test_a_file_of_another_suite_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    file.write_text('{"suite": "kernels"}')
    with pytest.raises(KernelError, match="is no result file of bench tiles"):
        suite.run(parsed("--fit", str(file)))
    with pytest.raises(KernelError, match="cannot be read"):
        suite.run(parsed("--fit", str(tmp_path / "missing.json")))


def test_a_case_that_does_not_exist_is_refused() -> None:
    with pytest.raises(KernelError, match="no case matches --filter 'alexnet'"):
        suite.run(parsed("--filter", "alexnet"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(KernelError, match="bench tiles needs a CUDA device"):
        suite.run(parsed())
