"""The benchmark of gradients of filters: right first, both ways in turn, and what must hold, told whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import __main__ as bench
from bench import filter_gradients
from bench.filter_gradients import Case
from hetconv.errors import KernelError
from hetconv.kernels import tap_products

SMALL = Case("small", 2, 8, 4, (6, 5))


@pytest.fixture(autouse=True)
def _few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_gradients, "CACHES", 1)
    monkeypatch.setattr(filter_gradients, "ROUNDS", 2)


def test_both_are_timed_and_products_are_right() -> None:
    row = filter_gradients.measured(SMALL)
    assert min(row["products_ms"], row["onednn_ms"], row["input_ms"], row["ratio"]) > 0
    assert row["error"] <= filter_gradients.EXACT
    assert not row["chosen"]


def test_a_wrong_gradient_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tap_products.gradient_of_filters
    monkeypatch.setattr(tap_products, "gradient_of_filters", lambda *args: right(*args) * 1.01)
    with pytest.raises(KernelError, match="off by"):
        filter_gradients.measured(SMALL)


@pytest.mark.parametrize(
    ("ratio", "chosen", "verdict"), [(1.1, True, "met"), (0.9, True, "MISSED"), (0.9, False, "not")]
)
def test_products_are_chosen_where_they_are_no_slower(
    ratio: float, chosen: bool, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    row = {"products_ms": 1.0, "onednn_ms": ratio, "input_ms": 1.0, "ratio": ratio, "chosen": chosen, "error": 0.0}
    monkeypatch.setattr(filter_gradients, "measured", lambda case: row)
    threads = torch.get_num_threads()
    bench.main(["filter-gradients", "-o", str(tmp_path / "gradients.json")])
    torch.set_num_threads(threads)
    said = capsys.readouterr().out.splitlines()
    assert verdict in said[-2]
    assert json.loads(said[-1]) == json.loads((tmp_path / "gradients.json").read_text())
    assert len(json.loads(said[-1])["cases"]) == len(filter_gradients.CASES)
