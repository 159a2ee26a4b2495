"""Data parallelism over split models: `DistributedDataParallel` along one dimension of
a mesh, splits along another.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import hetconv
from hetconv.errors import HetConvError
from hetconv.sharding.split import SplitKind
from tests.equivalence import Differences, apart, assert_same, full_gradients
from tests.nets import Chain, ResNet, plan_of, splits_of
from tests.spawn import on_ranks

STEPS = 3
MIXES: tuple[tuple[SplitKind, ...], ...] = (
    ("height",),
    ("filter", "channel"),
    ("sample", "width", "filter"),
)


def mesh_of_4() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "split"))


def replicas_of_splits(
    plain: nn.Module, kinds: tuple[SplitKind, ...], ratio: tuple[int, int] = (3, 1)
) -> tuple[nn.Module, DistributedDataParallel, int]:
    """(a copy that is cut over a row of the mesh, the same one wrapped, which replica
    this rank belongs to).
    """
    mesh = mesh_of_4()
    cut = copy.deepcopy(plain)
    plan = plan_of(cut, splits_of(cut, kinds, ratio), 2)
    cut = hetconv.parallelize(cut, plan, group=mesh["split"].get_group())
    wrapped = DistributedDataParallel(cut, process_group=mesh["replica"].get_group())
    return cut, wrapped, mesh["replica"].get_local_rank()


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y, target)


def batches(shape: tuple[int, ...], classes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        x = torch.randn(shape, generator=generator)
        found.append((x, torch.randint(classes, shape[:1], generator=generator)))
    return found


def compared(
    cut: nn.Module, serial: nn.Module, step: int, with_state: bool = True
) -> Differences:
    gradients = full_gradients(cut)
    found = {
        f"{step} gradient {k}": apart(gradients[k], p.grad)
        for k, p in serial.named_parameters()
    }
    if with_state:
        state = hetconv.full_state_dict(cut)
        found |= {
            f"{step} state {k}": apart(state[k], v)
            for k, v in serial.state_dict().items()
        }
    return found


def without_batch_norm(
    kinds: tuple[SplitKind, ...], ratio: tuple[int, int], clip: bool
) -> Differences:
    """Against one device on the whole batch, with every replica on its half."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(dist.get_rank())  # the truth is rank 0's
    cut, wrapped, replica = replicas_of_splits(Chain(), kinds, ratio)
    torch.manual_seed(0)
    serial = Chain()
    updates = [
        torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (serial, wrapped)
    ]
    found: Differences = {}
    for i, (x, target) in enumerate(batches((4, 4, 16, 16), 3)):
        for update in updates:
            update.zero_grad()
        half = slice(2 * replica, 2 * replica + 2)
        loss_of(serial(x), target).backward()
        loss_of(wrapped(x[half]), target[half]).backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(serial.parameters(), 0.01)
            found[f"{i} norm"] = apart(norm, hetconv.clip_grad_norm_(cut, 0.01))
        for update in updates:
            update.step()
        found |= compared(cut, serial, i)
    found["drift"] = hetconv.sync_replicated(cut)
    return found


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("ratio", [(3, 1), (1, 0)])
@pytest.mark.parametrize("kinds", MIXES, ids="-".join)
def test_replicas_of_uneven_splits_train_as_one_device_on_the_whole_batch(
    kinds: tuple[SplitKind, ...], ratio: tuple[int, int], clip: bool
) -> None:
    assert_same(on_ranks(4, without_batch_norm, kinds, ratio, clip))


def with_batch_norm(kinds: tuple[SplitKind, ...]) -> Differences:
    """Against two whole replicas, of which each has its own statistics and begins with
    the first one's buffers.
    """
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    serial = ResNet()
    cut, wrapped, replica = replicas_of_splits(serial, kinds)
    both = [serial, copy.deepcopy(serial)]
    updates = [
        torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (*both, wrapped)
    ]
    found: Differences = {}
    for i, (x, target) in enumerate(batches((4, 3, 20, 20), 5)):
        for update in updates:
            update.zero_grad()
        for mine, first in zip(both[1].buffers(), both[0].buffers(), strict=True):
            mine.copy_(first)
        for k, m in enumerate(both):
            loss_of(m(x[2 * k : 2 * k + 2]), target[2 * k : 2 * k + 2]).backward()
        for a, b in zip(*(m.parameters() for m in both), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            a.grad.add_(b.grad).div_(2)
            b.grad.copy_(a.grad)
        half = slice(2 * replica, 2 * replica + 2)
        loss_of(wrapped(x[half]), target[half]).backward()
        for update in updates:
            update.step()
        found |= compared(cut, both[replica], i)
    return found


@pytest.mark.parametrize("kinds", MIXES, ids="-".join)
def test_batch_norm_has_the_statistics_of_its_replica(
    kinds: tuple[SplitKind, ...],
) -> None:
    assert_same(on_ranks(4, with_batch_norm, kinds))


def accumulated(kinds: tuple[SplitKind, ...]) -> Differences:
    """Two backwards under `no_sync` and a third that sums them, as on one device."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    serial = Chain()
    cut, wrapped, replica = replicas_of_splits(serial, kinds)
    half = slice(2 * replica, 2 * replica + 2)
    for i, (x, target) in enumerate(batches((4, 4, 16, 16), 3)):
        loss_of(serial(x), target).backward()
        with wrapped.no_sync() if i < STEPS - 1 else torch.enable_grad():
            loss_of(wrapped(x[half]), target[half]).backward()
    return compared(cut, serial, 0)


def test_gradients_accumulate_over_replicas() -> None:
    assert_same(on_ranks(4, accumulated, ("height", "filter")))


def replicas_of_slices(over: str) -> None:
    plain, mesh = Chain(), mesh_of_4()
    plan = plan_of(plain, splits_of(plain, ("filter",), (1, 1)), 2)
    cut = hetconv.parallelize(plain, plan, group=mesh["split"].get_group())
    given = {
        "all ranks": {},
        "a group": {"process_group": mesh["split"].get_group()},
        "a mesh": {"device_mesh": mesh["split"]},
    }[over]
    with pytest.raises(HetConvError, match="because a split model sums"):
        DistributedDataParallel(nn.Sequential(cut), **given)


@pytest.mark.parametrize("over", ["all ranks", "a group", "a mesh"])
def test_replicas_of_slices_are_refused_on_all_ranks(over: str) -> None:
    on_ranks(4, replicas_of_slices, over)
