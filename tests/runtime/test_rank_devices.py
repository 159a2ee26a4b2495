"""What ranks tell of their devices, and the profile that they get for it."""

from __future__ import annotations

import platform
from dataclasses import replace
from itertools import combinations
from unittest import mock

import pytest
import torch.distributed as dist

import hetconv
from hetconv.errors import DisagreementError, ProfileError
from hetconv.runtime.rank_devices import device_identity
from hetconv.schemas.cluster_profile import nodes_of
from hetconv.schemas.device_model import DeviceModel, LinkModel
from tests.spawn import on_ranks

HOSTS = ("a", "b", "c", "d")


def cluster() -> hetconv.ClusterProfile:
    """This CPU on four hosts, of four speeds, and with links that differ."""
    here = replace(device_identity("cpu"), unit="1 thread")
    devices = tuple(
        DeviceModel(
            "cpu", "cpu", 1e9, {"float32": 1e9 * n}, 1e9, identity=replace(here, host=h)
        )
        for n, h in enumerate(HOSTS, 1)
    )
    links = {
        f"{a}-{b}": LinkModel(1e-6 * (a + 4 * b), 1e-9)
        for a, b in combinations(range(4), 2)
    }
    return hetconv.ClusterProfile(devices, links, nodes=nodes_of(devices))


def profile_on(hosts: str, whole: hetconv.ClusterProfile) -> hetconv.ClusterProfile:
    with mock.patch.object(platform, "node", return_value=hosts[dist.get_rank()]):
        return hetconv.profile_of_ranks(whole, "cpu")


@pytest.mark.parametrize("hosts", ["ac", "dba"])
def test_ranks_get_the_profile_of_their_hosts_in_their_order(hosts: str) -> None:
    whole = cluster()
    expected = whole.subset([HOSTS.index(host) for host in hosts])
    assert on_ranks(len(hosts), profile_on, hosts, whole) == [expected] * len(hosts)


def check_refusals() -> None:
    rank, whole = dist.get_rank(), cluster()
    with pytest.raises(ProfileError, match=r"rank 1 computes on .* on x, but"):
        profile_on("ax", whole)
    with pytest.raises(DisagreementError, match="profile_of_ranks"):
        profile_on("ab", whole if rank else whole.subset((0, 1)))
    with pytest.raises(hetconv.HetConvError, match=r"on rank 1.*'meta'; give cpu, or"):
        hetconv.profile_of_ranks(whole, "meta" if rank else "cpu")
    with pytest.raises(ProfileError, match=r"rank 0 .* named 'gpu', but .* 'cpu'"):
        hetconv.profile_of_ranks(whole, "cpu", name="gpu")
    assert profile_on("ab", whole).world == 2


def test_what_one_rank_does_not_find_is_refused_on_all() -> None:
    on_ranks(2, check_refusals)


def by_name(whole: hetconv.ClusterProfile) -> hetconv.ClusterProfile:
    return hetconv.profile_of_ranks(
        whole, "cpu", name=("T4", "A100-SXM4-80GB")[dist.get_rank()]
    )


def test_devices_of_data_sheets_are_found_by_their_names() -> None:
    whole = hetconv.ClusterProfile.from_devices("A100-SXM4-80GB, T4, T4")
    assert on_ranks(2, by_name, whole) == [whole.subset((1, 0))] * 2
