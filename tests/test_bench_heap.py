"""The benchmark of memory that is kept: two processes, in turn, and what must hold, told whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench import heap
from bench.autotune import Case
from hetconv.errors import HetConvError

SMALL = Case("small", "bench.cases:stack", '{"blocks": 1, "channels": 4}', (1, 3, 16, 16))


def test_both_processes_step_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "ROUNDS", 2)
    row = heap.measure(SMALL, "train")
    assert min(row["kept_ms"], row["given_back_ms"], row["ratio"]) > 0


def test_a_process_that_cannot_keep_memory_ends_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    with pytest.raises(HetConvError, match="ended"):
        heap.measure(SMALL, "infer")


@pytest.mark.parametrize(("ratio", "verdict"), [(1.1, "met"), (0.9, "MISSED")])
def test_nowhere_may_steps_be_slower(
    ratio: float, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heap, "measure", lambda *_: {"kept_ms": 1.0, "given_back_ms": ratio, "ratio": ratio})
    bench.main(["heap", "-o", str(tmp_path / "heap.json")])
    said = capsys.readouterr().out.splitlines()
    assert verdict in said[-2]
    assert json.loads(said[-1]) == json.loads((tmp_path / "heap.json").read_text())
    assert len(json.loads(said[-1])["cases"]) == len(heap.CASES) * len(heap.MODES)
