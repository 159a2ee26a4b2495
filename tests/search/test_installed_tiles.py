"""Tuned tiles in files, and on the ranks that install them."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hetconv
from hetconv import kernels
from hetconv.kernels import Tile, tiles
from hetconv.nn import parallelize
from hetconv.schemas.tuning_results import TunedTile
from hetconv.tracing.tracer import capture
from tests.interpreter import (
    DEVICE,
    ON_GPU,
    geometry,
    tensors,
)
from tests.nets import Chain, plan_of, splits_of
from tests.search.test_tuned_tiles import NAME, SMALL, SPEC, entry
from tests.spawn import on_ranks

pytestmark = pytest.mark.usefixtures("no_tiles_installed")


def profile(*found: TunedTile) -> hetconv.ClusterProfile:
    return replace(hetconv.ClusterProfile.from_devices(["T4", "T4"]), tiles=found)


def test_tiles_go_from_the_profile_s_file_into_the_plan_s(tmp_path: Path) -> None:
    made = profile(
        entry(), entry("aten", what="weight gradient", heuristic_s=None, torch="9.9")
    )
    made.save(tmp_path / "cluster.json")
    again = hetconv.ClusterProfile.load(tmp_path / "cluster.json")
    assert again == made
    plan = hetconv.make_plan(capture(Chain(), torch.ones(2, 4, 16, 16)), again)
    assert plan.tiles == made.tiles
    plan.save(tmp_path / "plan.json")
    assert hetconv.Plan.load(tmp_path / "plan.json") == plan
    assert plan.with_splits({}).tiles == made.tiles


@pytest.mark.parametrize("kind", [hetconv.ClusterProfile, hetconv.Plan])
def test_an_older_file_has_no_tiles(kind: Any, tmp_path: Path) -> None:
    made = (
        profile()
        if kind is hetconv.ClusterProfile
        else plan_of(Chain(), splits_of(Chain(), ("filter",), (3, 1)), 2)
    )
    made.save(tmp_path / "file.json")
    document = json.loads((tmp_path / "file.json").read_text())
    assert document.pop("tiles") == []
    (tmp_path / "file.json").write_text(json.dumps(document))
    assert kind.load(tmp_path / "file.json") == made


def test_an_entry_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    profile(entry()).save(tmp_path / "cluster.json")
    document = json.loads((tmp_path / "cluster.json").read_text())
    document["tiles"][0] |= {"what": "backward", "colour": "green"}
    (tmp_path / "cluster.json").write_text(json.dumps(document))
    with pytest.raises(hetconv.ProfileError, match=r"tiles\.0\.what.*tiles\.0\.colour"):
        hetconv.ClusterProfile.load(tmp_path / "cluster.json")


def installed(*found: TunedTile) -> list[str]:
    """Installs them as `parallelize` does; the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize.install_tiles(parallelize.tiles_by_origin(found), DEVICE)
    return [str(w.message) for w in caught]


def test_tiles_of_this_device_and_these_versions_serve() -> None:
    assert (
        installed(
            entry(),
            entry("aten", what="weight gradient"),
            entry(torch="1.0"),
            entry(device="K80"),
        )
        == []
    )
    assert tiles.tuned_entry(NAME, "forward", SPEC, "ieee") == SMALL
    assert tiles.tuned_entry(NAME, "weight gradient", SPEC, "ieee") == "aten"
    assert tiles.tuned_entry("K80", "forward", SPEC, "ieee") is None


@pytest.mark.parametrize(
    "changed", [{"torch": "1.0"}, {"triton": "1.0"}, {"device": "K80"}]
)
def test_tiles_of_others_are_left_out_and_named_once(changed: dict[str, str]) -> None:
    (said,) = installed(entry(**changed))
    assert all(
        word in said
        for word in (
            *changed.values(),
            *tiles.versions_in_use(),
            NAME,
            "hetconv autotune",
        )
    )
    assert tiles.tuned_entry(NAME, "forward", SPEC, "ieee") is None
    assert installed(entry(**changed)) == []


@pytest.mark.skipif(ON_GPU, reason="about the CPU")
def test_a_rank_that_runs_no_kernel_is_not_bothered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    assert installed(entry(device="K80")) == []


def test_a_tile_that_was_tuned_for_other_memory_gives_way() -> None:
    """Boxes are fetched from aligned channels_last tensors; of others the default tile
    computes the same.
    """
    t = tensors(SPEC)
    x = torch.nn.functional.pad(t.x, (0, 0, 0, 0, 0, 1)).contiguous(
        memory_format=torch.channels_last
    )[:, :16]
    tiles.install({("forward", SPEC, "ieee"): Tile("tma", 64, 64, 16, 4, 2)}, NAME)
    found = kernels.conv2d_forward(x, t.w, None, *geometry(SPEC), backend="triton")
    expected = kernels.conv2d_forward(t.x, t.w, None, *geometry(SPEC), backend="aten")
    assert (found - expected).norm() <= 2e-3 * expected.norm()
    with pytest.raises(hetconv.KernelError, match="reads by TMA"):
        kernels.conv2d_forward(
            x, t.w, None, *geometry(SPEC), tile=Tile("tma", 64, 64, 16, 4, 2)
        )


def parallelized(choice: str) -> Any:
    """What a rank has installed after `parallelize`, or the error."""
    plan = replace(
        plan_of(Chain(), splits_of(Chain(), ("filter",), (3, 1)), 2),
        tiles=(entry(choice, device="cpu"),),
    )
    try:
        hetconv.parallelize(Chain(), plan)
    except hetconv.HetConvError as e:
        return str(e)
    finally:
        served = tiles.tuned_entry("cpu", "forward", SPEC, "ieee")
        tiles.tuned._installed.clear()
    return served


@pytest.mark.skipif(
    ON_GPU, reason="the ranks are on the CPU, whose kernels run in the interpreter"
)
def test_parallelize_installs_the_plan_s_tiles_or_refuses_them_on_every_rank() -> None:
    assert on_ranks(2, parallelized, str(SMALL)) == [SMALL, SMALL]
    assert on_ranks(2, parallelized, "aten") == ["aten", "aten"]
    assert all(
        "tile 'large' is not understood" in said
        for said in on_ranks(2, parallelized, "large")
    )
