"""The benchmark of networks: a split model is timed against half of it, and its memory
measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from bench import __main__ as bench
from bench import networks
from bench.shared.networks import NETWORKS, Network
from bench.shared.step_profile import profiled
from tests.spawn import spawn


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 2, 1)
    )


def measured() -> Any:
    few = {"infer": 1, "train": 1}
    with (
        patch.dict(NETWORKS, {"small": Network(small, (1, 3, 64, 64))}),
        patch.object(networks, "ROUNDS", few),
    ):
        return networks.measure("small")


def test_each_mode_is_timed_and_its_memory_measured() -> None:
    rows, _ = spawn(2, measured)
    assert [(r["network"], r["mode"]) for r in rows] == [
        ("small", mode) for mode in networks.MODES
    ]
    images = 64 * 64 * 4
    for r in rows:
        missed = r["messages_ms"] + r["python_ms"] + r["repeated_ms"]
        assert missed == pytest.approx(r["split_ms"] - r["bound_ms"], abs=0.05)
        assert r["plain_bytes"] >= 16 * images  # two results of eight channels
        assert all(0 < n < r["plain_bytes"] for n in r["rank_bytes"])
        assert all(n >= 4 * images for n in r["predicted_bytes"])


def test_the_peak_is_that_of_one_moment() -> None:
    def step() -> None:
        for _ in range(3):
            x = torch.empty(1000, dtype=torch.uint8)
            y = torch.empty(500, dtype=torch.uint8)
            del x, y

    assert 1500 <= profiled(step).peak_bytes < 2000


def test_what_must_hold_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = ("plain_ms", "bound_ms", "split_ms", "messages_ms", "python_ms")
    row = dict.fromkeys((*figures, "repeated_ms"), 1.0) | {
        "network": "VAE decoder",
        "vs_bound": 1.2,
        "vs_plain": 1.5,
        "plain_bytes": 100,
        "rank_bytes": [60, 50],
        "predicted_bytes": [66, 60],
    }
    rows = [row | {"mode": mode} for mode in networks.MODES]
    monkeypatch.setattr(networks, "run_on", lambda *_: rows)
    bench.main(["networks", "--only", "VAE", "-o", str(tmp_path / "networks.json")])
    said = capsys.readouterr().out
    of_step, mean = "1.25 over the worst step's bound", "1.1 over the geometric mean"
    assert f"met           infer: {of_step}" in said
    assert f"MISSED        infer: {mean}" in said
    assert "MISSED        infer: 15% over the worst error of memory" in said
    written = json.loads((tmp_path / "networks.json").read_text())
    assert written["cases"] == rows


def test_a_pattern_that_matches_nothing_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        bench.main(["networks", "--only", "nothing of this name"])
    assert "matches none of ResNet-50" in capsys.readouterr().err
