"""Figures of a tuning job, of numbers made by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetconv.autotune.cli import plots
from hetconv.autotune.cli.plots import HEAVIEST, draw, heaviest, short
from hetconv.autotune.measure.sampling import Passes
from hetconv.autotune.search.record import Record, Samples, Study, Trial
from hetconv.errors import HetConvError
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import Curve, LinkModel, OperatorModel

from .test_show import texts
from .test_summary import captured

CONV = "conv2d 1x{c}x56x56 k{c} 3x3 s(1,1) p((1,1),(1,1)) d(1,1) g1 float32 by pixels"
KEYS = [CONV.format(c=8 * c) for c in range(1, 9)]
ONE = OperatorModel(Curve((1.0,), (1.0,)), Curve((1.0,), (1.0,)))
STUDIES = (
    Study(
        "height ratio",
        "the computed ratio",
        (Trial("5:3", 1.0), Trial("6:2", 0.875), Trial("7:1", None, "full")),
    ),
    Study("nothing yet", "it", ()),
    Study(
        "plans",
        "the first",
        (Trial("planned", None, "x" * 100), Trial("", None, "interrupted")),
    ),
)


def samples(seconds: float, slow: float = 1.0) -> Samples:
    """Three repeats at two shares, the last of which may be an outlier."""
    return {
        s: Passes([seconds * s, seconds * s, seconds * s * slow], [2 * seconds * s] * 3)
        for s in (0.5, 1.0)
    }


def record(**changed: Any) -> Record:
    bare = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="host")
    devices = tuple(
        replace(d, operators=dict.fromkeys(KEYS, ONE)) for d in bare.devices
    )
    links = {"0-1": LinkModel(120e-6, 1e-9, back_s_per_byte=2e-9)}
    measured = {
        key: [samples(0.001 * (i + 1)), samples(0.002 * (i + 1), 9.0)]
        for i, key in enumerate(KEYS)
    }
    others = {"elementwise float32": [samples(9.0)] * 2}
    usual = Record(
        replace(bare, devices=devices, links=links),
        captured(),
        {},
        measured | others,
        STUDIES,
    )
    return replace(usual, **changed)


def test_a_job_is_drawn_with_names_and_units(tmp_path: Path) -> None:
    written = draw(record(), tmp_path)
    assert [p.name for p in written] == ["history.svg", "layers.svg", "links.svg"]
    assert sorted(tmp_path.iterdir()) == sorted(written)
    history, layers, links = map(texts, written)
    assert {
        "height ratio",
        "step time, as a multiple of: the computed ratio",
        "best so far",
        "plans",
    } <= history
    assert {
        "5:3  1",
        "6:2  2",
        "0.875",
        "failed",
        "full",
        f"{'x' * 69}…",
        "interrupted",
    } <= history
    assert "nothing yet" not in history
    assert {
        "0: cpu, forward",
        "1: cpu@0.5, backward",
        "share of the layer, %",
        "milliseconds",
    } <= layers
    assert {short(key) for key in KEYS[-HEAVIEST:]} <= layers
    assert not {short(key) for key in KEYS[:-HEAVIEST]} & layers
    assert "not shown: 2 slower" in layers
    assert {
        "latency, microseconds",
        "bandwidth, GB/s",
        "120",
        "1",
        "0.5",
        "to rank",
        "0: cpu",
    } <= links


def test_the_heaviest_layers_come_first_and_nothing_else() -> None:
    assert list(heaviest(record())) == KEYS[: -HEAVIEST - 1 : -1]
    fitted = {KEYS[0]: [{}, samples(1.0)], KEYS[1]: [{}, {}]}
    assert (
        list(heaviest(record(samples=fitted))) == KEYS[:1]
    )  # whose rank 0 had not the memory


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_figures_of_few_layers(layers: int, tmp_path: Path) -> None:
    few = {KEYS[i]: [{}, samples(1.0)] for i in range(layers)}
    assert [p.name for p in draw(record(samples=few, studies=()), tmp_path)] == [
        "layers.svg",
        "links.svg",
    ]


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    alone = replace(
        ClusterProfile.from_devices("cpu"), devices=record().profile.devices[:1]
    )
    assert draw(record(profile=alone, samples={}, studies=STUDIES[1:2]), tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_a_link_that_costs_nothing_has_a_picture(tmp_path: Path) -> None:
    free = replace(record().profile, links={"0-1": LinkModel(0.0, 0.0)})
    plots.plot_links(free, tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


def test_operators_are_named_in_short() -> None:
    assert short(KEYS[0]) == "conv2d 1x8x56x56 k8 3x3 s(1,1), by pixels"
    assert (
        short("linear 1x512 k1000 float32 by filters")
        == "linear 1x512 k1000 float32, by filters"
    )


def test_a_folder_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plots.prepare(tmp_path / "new" / "plots")
    assert not list((tmp_path / "new" / "plots").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(
        HetConvError,
        match=r"no picture can be written to .*file.plots \(Not a directory\)",
    ):
        plots.prepare(tmp_path / "file" / "plots")

    def full(dir: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plots, "TemporaryFile", full)
    with pytest.raises(
        HetConvError, match=r"\(No space left on device\); give another"
    ):
        plots.prepare(tmp_path)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(HetConvError, match="pip install matplotlib"):
        plots.prepare(tmp_path)
