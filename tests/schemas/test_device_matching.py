"""The devices of today's ranks, found in a profile of all devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetconv.errors import ProfileError
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_matching import RankDevice, ranks_in_profile
from hetconv.schemas.provenance import DeviceIdentity
from tests.profiles import A0, A1, B0, CPU, NEW, profile

MEASURED = (A0, A1, CPU, B0, CPU)  # two ranks share the CPU of host a
SHEETS = ClusterProfile.from_devices(
    "A100-SXM4-80GB, 2xT4 / 2xT4", between="ethernet-100g"
)


def told(*identities: DeviceIdentity) -> list[RankDevice]:
    return [RankDevice(identity) for identity in identities]


def named(*names: str, host: str = "a") -> list[RankDevice]:
    identity = replace(A0, host=host, unit="GPU-not-measured")
    return [RankDevice(identity, name) for name in names]


@given(st.permutations(range(5)), st.integers(1, 5))
def test_every_rank_gets_the_device_that_it_has(order: list[int], count: int) -> None:
    today = [MEASURED[rank] for rank in order[:count]]
    cluster = profile(MEASURED, NEW)
    found = ranks_in_profile(cluster, told(*today))
    assert [MEASURED[rank] for rank in found] == today
    assert len(set(found)) == count
    assert [d.identity for d in cluster.subset(found).devices] == today


def test_equal_devices_are_taken_in_their_order() -> None:
    cluster = profile(MEASURED, NEW)
    assert ranks_in_profile(cluster, told(CPU, B0, CPU)) == (2, 3, 4)
    assert ranks_in_profile(SHEETS, named("T4", "T4")) == (1, 2)


def test_a_gpu_is_found_on_a_host_that_has_another_name_now() -> None:
    moved = replace(B0, host="container-7f3c")
    assert ranks_in_profile(profile(MEASURED, NEW), told(moved)) == (3,)


@pytest.mark.parametrize(
    ("other", "say"),
    [
        (replace(CPU, host="c"), r"EPYC \(2 threads\) on c, but .* on b"),
        (replace(CPU, unit="1 thread"), "as many threads as were measured.*OMP_NUM"),
        (replace(CPU, speed=0.5), "at 0.5 of its speed on a, but .*autotune"),
        (replace(A0, unit="GPU-new"), r"A100 \(GPU-new\) on a, but .*GPU-a0.*autotune"),
    ],
)
def test_a_device_that_was_not_measured_is_refused(
    other: DeviceIdentity, say: str
) -> None:
    with pytest.raises(ProfileError, match=f"rank 1 computes on .*{say}"):
        ranks_in_profile(profile(MEASURED, NEW), told(A0, other))


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(ProfileError, match="as 2 of 3 ranks do, but the profile has 1"):
        ranks_in_profile(profile(MEASURED, NEW), told(A0, B0, A0))
    with pytest.raises(ProfileError, match="'A100-SXM4-80GB', as 2 of"):
        ranks_in_profile(SHEETS, named("A100-SXM4-80GB", "A100-SXM4-80GB"))


def test_a_profile_of_data_sheets_asks_for_names() -> None:
    with pytest.raises(ProfileError, match=r"give the name.*'A100-SXM4-80GB', 'T4'"):
        ranks_in_profile(SHEETS, told(A0))
    with pytest.raises(ProfileError, match="named 'V100', but the profile has 'A100"):
        ranks_in_profile(SHEETS, named("V100"))


def test_one_name_on_two_hosts_is_told_apart_by_the_host() -> None:
    cluster = profile((A0, B0), NEW)
    devices = tuple(replace(device, name="cuda:0") for device in cluster.devices)
    cluster = replace(cluster, devices=devices)
    assert ranks_in_profile(cluster, named("cuda:0", host="b")) == (1,)
    assert ranks_in_profile(cluster, named("cuda:0", "cuda:0", host="new")) == (0, 1)
