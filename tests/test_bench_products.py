"""The benchmark of products of matrices: right first, both ways in turn, and what must hold, told whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench import products
from bench.products import Case
from hetconv.errors import KernelError
from hetconv.kernels import column_products, processor, tap_products
from hetconv.kernels.aten import PASSES
from hetconv.kernels.tiles import Pass

SMALL = Case("small", 2, 8, 4, (6, 5))
pytestmark = pytest.mark.skipif(not processor.has_products(), reason="this torch multiplies no matrices by oneDNN")


@pytest.fixture(autouse=True)
def _few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "CACHES", 1)
    monkeypatch.setattr(products, "ROUNDS", 2)


@pytest.mark.parametrize("case", [SMALL, SMALL._replace(stride=2), SMALL._replace(taps=1)])
@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("what", PASSES)
def test_both_are_timed_and_products_are_right(
    what: Pass, short: bool, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "short_vectors", lambda: short)
    row = products.measured(case, what)
    assert min(row["products_ms"], row["torch_ms"], row["ratio"]) > 0
    assert row["error"] <= products.EXACT
    assert not row["chosen"]


@pytest.mark.parametrize(("module", "short"), [(tap_products, True), (column_products, False)])
def test_a_wrong_gradient_is_not_timed(module: Any, short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    right = module.gradient_of_filters
    monkeypatch.setattr(products, "short_vectors", lambda: short)
    monkeypatch.setattr(module, "gradient_of_filters", lambda *args: right(*args) * 1.01)
    with pytest.raises(KernelError, match="off by"):
        products.measured(SMALL, "weight gradient")


@pytest.mark.parametrize(
    ("ratio", "chosen", "verdict"), [(1.1, True, "met"), (0.9, True, "MISSED"), (0.9, False, "not")]
)
def test_products_are_chosen_where_they_are_no_slower(
    ratio: float, chosen: bool, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    row = {"products_ms": 1.0, "torch_ms": ratio, "ratio": ratio, "chosen": chosen, "error": 0.0}
    monkeypatch.setattr(products, "measured", lambda case, what: row)
    bench.main(["products", "-o", str(tmp_path / "products.json")])
    said = capsys.readouterr().out.splitlines()
    assert verdict in said[-2]
    assert json.loads(said[-1]) == json.loads((tmp_path / "products.json").read_text())
    assert len(json.loads(said[-1])["cases"]) == len(products.CASES) * len(PASSES)
