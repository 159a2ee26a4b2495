"""What profiles of older versions say, once they are brought up to date."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from hetconv.cost import operator_key
from hetconv.profile import ClusterProfile
from hetconv.provenance import Conditions
from hetconv.rules import Linear

DATA = Path(__file__).parent / "data"
UNKNOWN = Conditions("", "2.11.0+cu128", "3.6.0")


def test_an_old_profile_says_what_it_knows_of_its_conditions_and_finds_its_operators() -> None:
    profile = ClusterProfile.load(DATA / "profile-v1.json")
    assert operator_key(Linear((4, 8), 10), "pixels", "float32") in profile.devices[0].operators
    assert operator_key(Linear((4, 8), 10), "pixels", "float16") not in profile.devices[0].operators
    assert not [key for key in profile.devices[0].operators if re.search(r"k\d+ by", key)]
    assert [d.measured for d in profile.devices] == [UNKNOWN, replace(UNKNOWN, triton="")]
    assert [x.measured for x in (*profile.links.values(), *profile.tuned, *profile.chunks)] == [UNKNOWN] * 3
    assert [d.identity for d in profile.devices] == [None, None]
    assert profile.chunks[0].spec.size == (16, 16)


def test_an_old_profile_keeps_its_plans() -> None:
    (plan,) = ClusterProfile.load(DATA / "profile-v3.json").plans
    assert (plan.name, plan.step_s, plan.alone_s, plan.even_s) == ("uneven height split", 0.01, 0.014, 0.02)


def test_an_old_profile_has_corrected_layers_that_take_as_long_as_they_did(tmp_path: Path) -> None:
    document = json.loads((DATA / "profile-v6.json").read_text())
    document["devices"][1] |= {"slowness": 1.25, "corrections": {"filter": 0.8, "height": 2.0}}
    (tmp_path / "old.json").write_text(json.dumps(document))
    fast, slow = ClusterProfile.load(tmp_path / "old.json").devices
    assert (fast.corrections, slow.corrections) == ({}, {"filter": 1.0, "height": 2.5})


def test_an_old_profile_from_data_sheets_was_not_measured(tmp_path: Path) -> None:
    document = json.loads((DATA / "profile-v2.json").read_text()) | {"estimated": True, "tuned": [], "chunks": []}
    (tmp_path / "old.json").write_text(json.dumps(document))
    profile = ClusterProfile.load(tmp_path / "old.json")
    assert [x.measured for x in (*profile.devices, *profile.links.values())] == [None] * 3
