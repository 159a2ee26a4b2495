"""How much of halos is hidden while a device computes: what is measured, of what, and
what the profile keeps of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetconv
from hetconv.autotune.launch.progress import Reporter
from hetconv.autotune.measure import overlap
from hetconv.autotune.measure.overlap import (
    hidden_part,
    most_halo_bound_layer,
    time_halos,
    with_overlap,
)
from hetconv.comm.rank_group import count_sent
from hetconv.cost.estimator import estimate
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.split import Split
from tests.spawn import on_ranks

SPEC = ConvSpec(1, 4, (12, 8), 6, (5, 5), (1, 1), ((2, 2), (2, 2)), (1, 1))


@pytest.mark.parametrize(
    ("computing", "halos", "on", "part"),
    [
        (10, 4, 10, 1.0),
        (10, 4, 14, 0.0),
        (10, 4, 12, 0.5),
        (4, 10, 11, 0.75),
        (10, 4, 15, 0.0),
        (10, 4, 9, 1.0),
    ],
)
def test_what_is_hidden_is_a_part_of_the_shorter_one(
    computing: float, halos: float, on: float, part: float
) -> None:
    assert hidden_part([computing + halos] * 3, [on] * 3, [halos] * 3) == part


def test_what_noise_hides_is_guessed() -> None:
    assert hidden_part([14, 14, 14], [10.9, 11, 11.1], [4, 4, 4]) == pytest.approx(
        0.75, abs=0.01
    )
    assert 0.5 < hidden_part([14, 14, 14], [10, 11, 14], [4, 4, 4]) < 0.65
    assert hidden_part([140, 140, 140], [100, 139, 180], [1, 1, 1]) == pytest.approx(
        0.5, abs=0.01
    )
    for nothing in ([3], [3, 3]):
        assert hidden_part(nothing, nothing, nothing) == 0.5


def test_the_layer_with_most_to_hide_is_measured() -> None:
    """The third one computes less and moves less than the second; the first gets its
    input whole.
    """
    sizes = (3, 64, 7), (64, 64, 5), (64, 1, 3)
    model = nn.Sequential(
        *(nn.Conv2d(c, k, kernel, padding=kernel // 2) for c, k, kernel in sizes)
    )
    graph = hetconv.capture(model, torch.zeros(1, 3, 64, 48))
    profile = ClusterProfile.from_devices(["cpu", "cpu@0.5"], link="pcie4-x16")
    found = most_halo_bound_layer(graph, profile, "infer")
    assert found is not None
    spec, split = found
    assert spec.kernel == (5, 5)
    assert split.kind in ("height", "width")
    assert split.sizes[0] > split.sizes[1] > 0
    plain = hetconv.capture(nn.Linear(3, 4), torch.zeros(2, 3))
    assert most_halo_bound_layer(plain, profile, "infer") is None


def timed(sizes: tuple[int, ...]) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each way to run a convolution, and the bytes that each sends."""
    real, sent = overlap.paired, {}

    def paired(
        steps: dict[str, Any], rounds: int, device: torch.device, longest: float
    ) -> dict[str, list[float]]:
        for name, step in steps.items():
            with count_sent() as counts:
                step()
            sent[name] = sum(counts.values())
        return real(steps, rounds, device, longest / 100)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "paired", paired)
        times = time_halos(SPEC, Split("height", sizes), torch.device("cpu"))
    return times, sent


@pytest.mark.parametrize("sizes", [(7, 5), (6, 0, 6)])
def test_a_convolution_is_measured_with_its_halos_and_these_alone(
    sizes: tuple[int, ...],
) -> None:
    found = on_ranks(len(sizes), timed, sizes)
    rows = (
        2 * 4 * SPEC.C * SPEC.size[1]
    )  # bytes of the two rows that each neighbour lends
    for times, sent in found:
        assert set(sent.values()) == {rows if sum(sent.values()) else 0}
        assert all(s > 0 for seconds in times.values() for s in seconds)
        assert times == found[0][0]
    assert sum(sum(sent.values()) > 0 for _, sent in found) == 2


def kept(overlap_s: dict[str, list[float]]) -> float:
    """What the profile of a model with halos says after the stage, if this was measured."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
    graph = hetconv.capture(model, torch.zeros(1, 3, 16, 16))
    profile = ClusterProfile.from_devices(["cpu", "cpu"], link="host")
    with pytest.MonkeyPatch.context() as patch, Reporter("test") as say:
        patch.setattr(overlap, "time_halos", lambda *_: overlap_s)
        return with_overlap(profile, graph, "infer", torch.device("cpu"), say).overlap


def test_the_profile_keeps_what_was_measured(tmp_path: Path) -> None:
    assert on_ranks(
        2, kept, {"overlapped": [12.0], "in turn": [14.0], "halos": [4.0]}
    ) == [
        0.5,
        0.5,
    ]
    profile = replace(ClusterProfile.from_devices(["cpu", "cpu"]), overlap=0.5)
    profile.save(tmp_path / "cluster.json")
    assert ClusterProfile.load(tmp_path / "cluster.json").overlap == 0.5
    text = (tmp_path / "cluster.json").read_text()
    (tmp_path / "old.json").write_text(text.replace(',\n "overlap": 0.5', ""))
    assert "overlap" not in (tmp_path / "old.json").read_text()
    assert ClusterProfile.load(tmp_path / "old.json").overlap == 1.0
    (tmp_path / "wrong.json").write_text(
        text.replace('"overlap": 0.5', '"overlap": 1.5')
    )
    with pytest.raises(hetconv.ProfileError, match="overlap"):
        ClusterProfile.load(tmp_path / "wrong.json")


def test_what_is_not_hidden_makes_a_step_longer() -> None:
    graph = hetconv.capture(
        nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1)] * 3), torch.zeros(1, 8, 64, 64)
    )
    profile = ClusterProfile.from_devices(["cpu", "cpu"], link="host")
    splits = dict.fromkeys(graph.layers, Split("height", (32, 32)))
    steps = [
        estimate(graph, replace(profile, overlap=part), splits, "infer")[0]
        for part in (1.0, 0.5, 0.0)
    ]
    assert steps[0].step_s < steps[1].step_s < steps[2].step_s
    assert steps[1].operator_sum_s == pytest.approx(
        (steps[0].operator_sum_s + steps[2].operator_sum_s) / 2
    )
    assert steps[1].compute_s == steps[0].compute_s
