"""Loaders that yield the same batches on all ranks, however the ranks' own ones differ."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterDataPipe, TensorDataset

import hetconv
from hetconv.errors import DisagreementError, HetConvError
from hetconv.runtime import batches
from tests.spawn import on_ranks

WORLD = 3


def unlike() -> int:
    """A number that differs between ranks."""
    return dist.get_rank()


def images(seed: int) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(14.0).view(7, 2), torch.arange(7))
    order = torch.Generator().manual_seed(seed)
    return DataLoader(data, 3, shuffle=True, generator=order)


def epochs(check: bool) -> list[Any]:
    seed = 0 if check else unlike()
    loader = hetconv.same_batches(images(seed), check=check)
    assert len(loader) == 3
    assert isinstance(loader.dataset, TensorDataset)
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = loader.nothing_of_this_name
    return [[y.tolist() for _, y in loader] for _ in range(2)]


@pytest.mark.parametrize("check", [False, True])
def test_all_ranks_see_the_epochs_of_the_first_one(check: bool) -> None:
    order = images(0)
    plain = [[y.tolist() for _, y in order] for _ in range(2)]
    assert plain[0] != plain[1]
    assert on_ranks(WORLD, epochs, check) == [plain] * WORLD


@dataclass
class Sample:
    name: str
    x: Tensor


class MyTensor(Tensor):
    pass


def any_batch(n: int) -> Any:
    x = torch.arange(24.0).view(1, 2, 3, 4) + n
    return {
        "twice": [x, x],
        "channels last": x.to(memory_format=torch.channels_last),
        "part": torch.arange(100.0).view(10, 10)[3:5, ::2],
        "kinds": (x.bfloat16(), x.bool(), x.to(torch.complex64), torch.tensor(n)),
        "empty": torch.empty(0, 3),
        "subclass": x.as_subclass(MyTensor),
        "sparse": torch.eye(3).to_sparse(),
        "objects": [Sample(f"n{n}", x + 1), UserDict(x=x), {1, 2}, None, 1.5, b"b"],
    }


def received() -> tuple[int, bool]:
    mine, expected = unlike(), any_batch(0)
    (batch,) = hetconv.same_batches([any_batch(mine)])
    assert batch.keys() == expected.keys()
    assert batch["twice"][0] is batch["twice"][1] is batch["objects"][1]["x"]
    assert batch["channels last"].is_contiguous(memory_format=torch.channels_last)
    assert type(batch["subclass"]) is MyTensor
    assert batch["objects"][0].name == "n0"
    assert batch["objects"][2:] == expected["objects"][2:]
    assert batch["sparse"].layout == torch.sparse_coo
    (again,) = hetconv.same_batches([batch], check=True)  # what every rank got
    assert again is batch
    pairs = zip(
        batches._described(batch).split(", "),
        batches._described(expected).split(", "),
        strict=True,
    )
    return mine, all(a == b for a, b in pairs)


def test_batches_may_be_of_any_kind() -> None:
    assert on_ranks(WORLD, received) == [(rank, True) for rank in range(WORLD)]


def draws() -> tuple[float, float]:
    torch.manual_seed(unlike())
    for _ in hetconv.same_batches(DataLoader(range(5), shuffle=True)):
        x = torch.rand(()).item()
    return x, torch.rand(()).item()


def test_random_numbers_go_on_alike_on_all_ranks() -> None:
    torch.manual_seed(0)
    for _ in DataLoader(range(5), shuffle=True):
        x = torch.rand(()).item()
    assert on_ranks(WORLD, draws) == [(x, torch.rand(()).item())] * WORLD


def failing(n: int) -> Iterator[Tensor]:
    yield torch.zeros(2)
    if n == 0:
        raise OSError("the file of image 3 is cut off")
    yield torch.zeros(2)


def unlike_in(what: str) -> Any:
    n, x, one = unlike(), torch.arange(3), int(unlike() == 1)
    return {
        "order": lambda: [x, x.roll(one)],
        "shape": lambda: [{"image": x[: 3 - one], "id": 7}],
        "dtype": lambda: [(x.to(torch.int32) if n else x)],
        "value": lambda: [{"image": x, "id": f"image {n}"}],
        "inside": lambda: [UserDict(image=x + n)],
        "length": lambda: [x] * (2 + one),
        "error": lambda: failing(n),
    }[what]()


def message(what: str, check: bool) -> str:
    with pytest.raises(HetConvError) as found:
        for _ in hetconv.same_batches(unlike_in(what), check=check):
            pass
    assert isinstance(found.value, DisagreementError) == (what != "error")
    # The ranks can go on.
    assert [*hetconv.same_batches([unlike()])] == [0]
    return str(found.value).split("at ")[0] if what == "error" else str(found.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("order", "rank 1: same_batches: batch 1: (3,) torch.int64 with checksum"),
        ("shape", "rank 1: same_batches: batch 0: ['image'] (2,) torch.int64"),
        ("dtype", "rank 0: same_batches: batch 0: (3,) torch.int64"),
        ("value", "['id'] 'image 2'"),
        ("inside", "UserDict((3,) torch.int64 with checksum"),
        ("length", "rank 2: same_batches: batch 2: no batch left"),
    ],
)
def test_a_check_raises_alike_where_batches_differ(what: str, said: str) -> None:
    found = on_ranks(WORLD, message, what, True)
    assert len(set(found)) == 1
    assert said in found[0]
    assert "seed them alike, or leave check out" in found[0]


@pytest.mark.parametrize("check", [False, True])
def test_an_error_of_one_loader_is_raised_on_all_ranks(check: bool) -> None:
    (found,) = {*on_ranks(WORLD, message, "error", check)}
    assert "on rank 0: OSError: the file of image 3 is cut off" in found


def of_other_length() -> tuple[int, list[int]]:
    loader = hetconv.same_batches(range(2 + unlike()))
    return len(loader), [*loader]


def test_the_length_is_that_of_the_first_loader() -> None:
    assert on_ranks(WORLD, of_other_length) == [(2, [0, 1])] * WORLD


def without_length() -> None:
    loader = hetconv.same_batches(iter([1, 2]))
    with pytest.raises(TypeError, match="has no len"):
        len(loader)
    assert [*loader] == [1, 2]


def test_a_loader_may_have_no_length() -> None:
    on_ranks(WORLD, without_length)


class Pipe(IterDataPipe):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        yield 1


def refusals() -> list[str]:
    data = TensorDataset(torch.arange(6))
    part = DataLoader(data, sampler=DistributedSampler(data))
    # Each half of the ranks would train a replica.
    half = DataLoader(data, sampler=DistributedSampler(data, 1, 0))
    hetconv.same_batches(half)
    found = []
    for loader, check in ((part, False), (DataLoader(Pipe()), False), ([], unlike())):
        with pytest.raises(HetConvError) as error:
            hetconv.same_batches(loader, check=bool(check))
        found.append(str(error.value))
    return found


def test_what_cannot_give_whole_batches_is_refused_alike() -> None:
    found = on_ranks(WORLD, refusals)
    assert found.count(found[0]) == WORLD
    sampler, pipe, options = found[0]
    assert "leaves each of 3 ranks a part of the data" in sampler
    assert "give check=True" in pipe
    assert "rank 0: same_batches: check=False" in options


def other_steps() -> str:
    loader = iter(hetconv.same_batches([1, 2, 3]))
    next(loader)
    with pytest.raises(DisagreementError) as found:
        hetconv.same_batches([]) if unlike() == 1 else next(loader)
    return str(found.value)


def test_ranks_that_take_other_steps_do_not_wait_for_each_other() -> None:
    (found,) = {*on_ranks(WORLD, other_steps)}
    assert "rank 0: same_batches: batch 1" in found
