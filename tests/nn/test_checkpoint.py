"""Checkpoints: saved under one plan, loaded under another one or none, by hetconv or by
torch; whole, or not at all.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import MultiStepLR

import hetconv
from hetconv.nn import checkpoint
from tests.spawn import on_ranks, outcomes

from .test_optimizer_state import (
    Net,
    difference,
    fresh,
    optimizer_of,
    plain,
    split,
    told,
    train,
    trained,
)

# torch.distributed.checkpoint says so where there is one process.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning"
)
KINDS = ["sgd", "adam"]


def saving(path: Path, world: int, kind: str, steps: int, extra: Any = None) -> int:
    """The bytes that went from rank to rank, but for words of agreement and of torch's
    own planning.
    """
    model, optimizer = trained(split(world, 0), kind, steps)
    with hetconv.count_sent() as sent:
        hetconv.save_checkpoint(path, model, optimizer, extra=extra)
    return sent.total()


def going_on(path: Path, world: int, kind: str, steps: range) -> Any:
    model = split(world, 1)
    optimizer = fresh(model, kind)
    extra = hetconv.load_checkpoint(path, model, optimizer)
    train(model, optimizer, steps)
    return (
        hetconv.full_state_dict(model),
        hetconv.full_optim_state_dict(model, optimizer),
        extra,
    )


def serial(kind: str, steps: int) -> Any:
    net, optimizer = trained(plain(0), kind, steps)
    return dict(net.state_dict()), hetconv.full_optim_state_dict(net, optimizer)


def saved_serially(path: Path, kind: str, steps: int) -> None:
    hetconv.save_checkpoint(path, *trained(plain(0), kind, steps))


@pytest.mark.parametrize("worlds", [(3, 2), (4, 3), (2, 4)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [0, 2])
def test_a_run_goes_on_under_another_plan_and_under_none(
    worlds: tuple[int, int], kind: str, before: int, tmp_path: Path
) -> None:
    first, second = worlds
    assert on_ranks(first, saving, tmp_path / "run", first, kind, before) == [0] * first
    expected = serial(kind, 4)
    net = plain(1)
    optimizer = fresh(net, kind)
    hetconv.load_checkpoint(tmp_path / "run", net, optimizer)
    train(net, optimizer, range(before, 4))
    alone = dict(net.state_dict()), hetconv.full_optim_state_dict(net, optimizer)
    for found in (
        alone,
        *on_ranks(second, going_on, tmp_path / "run", second, kind, range(before, 4)),
    ):
        assert difference(found[0], expected[0]) <= 1e-9
        assert difference(found[1], expected[1]) <= 1e-9


def starting_or_going_on(path: Path, steps: int) -> tuple[Any, bool]:
    model, optimizer = trained(split(2, 0), "adam", 0)
    before = hetconv.full_state_dict(model)
    extra = hetconv.load_checkpoint(path, model, optimizer, missing_ok=True)
    unchanged = difference(hetconv.full_state_dict(model), before) == 0
    train(model, optimizer, range(extra or 0, steps))
    hetconv.save_checkpoint(path, model, optimizer, extra=steps)
    return extra, unchanged


@pytest.mark.parametrize("empty", [False, True])
def test_where_there_is_none_yet_a_program_starts(empty: bool, tmp_path: Path) -> None:
    if empty:
        (tmp_path / "run").mkdir()
    assert on_ranks(2, starting_or_going_on, tmp_path / "run", 2) == [(None, True)] * 2
    # Killed while it was replaced: the old one has been renamed.
    (tmp_path / "run").rename(tmp_path / ".run.old")
    assert on_ranks(2, starting_or_going_on, tmp_path / "run", 3) == [(2, False)] * 2
    (tmp_path / "run" / checkpoint.METADATA).write_bytes(b"torn")
    with pytest.raises(hetconv.HetConvError, match="is no checkpoint"):
        hetconv.load_checkpoint(tmp_path / "run", plain(0), missing_ok=True)


@pytest.mark.parametrize("how", ["hetconv", "torch"])
def test_a_plain_run_goes_on_split(how: str, tmp_path: Path) -> None:
    net, optimizer = trained(plain(0), "adam", 2)
    (tmp_path / "run").mkdir()
    if how == "hetconv":
        hetconv.save_checkpoint(tmp_path / "run", net, optimizer)
    else:
        state, optim = get_state_dict(net, optimizer)
        dcp.save({"model": state, "optimizer": optim}, checkpoint_id=tmp_path / "run")
    for found in on_ranks(3, going_on, tmp_path / "run", 3, "adam", range(2, 4)):
        assert difference(found[0], serial("adam", 4)[0]) <= 1e-9


def test_torch_alone_loads_it(tmp_path: Path) -> None:
    on_ranks(3, saving, tmp_path / "run", 3, "sgd", 2)
    net = plain(1)
    net.two.bias.requires_grad_(False)
    optimizer = fresh(net, "sgd")
    state, optim = get_state_dict(net, optimizer)
    dcp.load({"model": state, "optimizer": optim}, checkpoint_id=tmp_path / "run")
    set_state_dict(net, optimizer, model_state_dict=state, optim_state_dict=optim)
    train(net, optimizer, range(2, 4))
    assert difference(dict(net.state_dict()), serial("sgd", 4)[0]) <= 1e-9
    dcp_to_torch_save(tmp_path / "run", tmp_path / "file")
    assert (
        difference(torch.load(tmp_path / "file")["model"], serial("sgd", 2)[0]) <= 1e-9
    )


def test_each_rank_writes_its_slices_and_rank_0_what_is_replicated(
    tmp_path: Path,
) -> None:
    on_ranks(3, saving, tmp_path / "run", 3, "adam", 1)
    metadata = dcp.FileSystemReader(tmp_path / "run").read_metadata()
    files: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for index, info in metadata.storage_data.items():
        files.setdefault(index.fqn, []).append(
            (info.relative_path[:3], tuple(index.offset or ()))
        )
    assert sorted(files["model.one.weight"]) == [
        ("__0", (0, 0, 0, 0)),
        ("__2", (4, 0, 0, 0)),
    ]
    assert files["optimizer.state.one.weight.exp_avg"] == files["model.one.weight"]
    assert sorted(files["model.two.weight"]) == [
        ("__0", (0, 0, 0, 0)),
        ("__1", (0, 1, 0, 0)),
    ]
    assert files["model.norm.weight"] == files["model.two.bias"] == [("__0", (0,))]
    assert files["optimizer.state.one.weight.step"] == [("__0", ())]


def test_the_first_rank_that_holds_the_whole_writes_it(tmp_path: Path) -> None:
    on_ranks(4, saving, tmp_path / "run", 4, "adam", 1)
    storage = dcp.FileSystemReader(tmp_path / "run").read_metadata().storage_data
    wrote = {
        index.fqn: info.relative_path[:3]
        for index, info in storage.items()
        if "optimizer" not in index.fqn
    }
    written = [wrote[f"model.{name}.weight"] for name in ("one", "two", "head")]
    assert written == ["__0", "__1", "__2"]


def with_extra(path: Path) -> Any:
    model, optimizer = trained(split(2, 0), "sgd", 1)
    schedule = MultiStepLR(optimizer, [1, 3])
    hetconv.save_checkpoint(
        path,
        model,
        optimizer,
        extra={"schedule": schedule.state_dict(), "epochs": {}, "best": 0.5},
    )
    found = hetconv.load_checkpoint(path, model)
    return found == {"schedule": schedule.state_dict(), "epochs": {}, "best": 0.5}


def test_what_else_was_saved_comes_back_as_it_was(tmp_path: Path) -> None:
    """With its numbers as keys and its empty dictionaries; without an optimizer, too."""
    assert on_ranks(2, with_extra, tmp_path / "run") == [True, True]


def among_some(path: Path) -> Any:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    model, optimizer = trained(split(2, 0, group), "adam", 2)
    hetconv.save_checkpoint(path, model, optimizer)
    other = split(2, 1, group)
    found = optimizer_of(other, "adam")
    hetconv.load_checkpoint(path, other, found)
    return [hetconv.full_state_dict(other), hetconv.full_optim_state_dict(other, found)]


def test_a_model_over_some_of_the_ranks(tmp_path: Path) -> None:
    for found in on_ranks(3, among_some, tmp_path / "run")[1:]:
        assert difference(found, list(serial("adam", 2))) <= 1e-9


def loaded(path: Path) -> Any:
    net = plain(1)
    hetconv.load_checkpoint(path, net)
    return dict(net.state_dict())


def killed(path: Path, where: str, nth: int) -> None:
    """While it saves once more, this process ends where directories would change for
    the nth time.
    """
    net, optimizer = trained(plain(0), "sgd", 2)
    room: Any = {"rename": Path, "rmtree": checkpoint.shutil}[where]
    change, calls = getattr(room, where), []

    def fatal(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return change(*args, **options) if len(calls) < nth else os._exit(1)

    setattr(room, where, fatal)
    hetconv.save_checkpoint(path, net, optimizer)


@pytest.mark.parametrize(
    ("where", "nth", "steps"),
    [
        ("rename", 1, 1),
        ("rename", 2, 1),
        ("rename", 3, 1),
        ("rmtree", 1, 1),
        ("rmtree", 2, 2),
    ],
)
def test_a_save_that_is_cut_off_leaves_a_whole_checkpoint(
    where: str, nth: int, steps: int, tmp_path: Path
) -> None:
    """The first renaming is torch's, of its metadata. The next save takes away what was
    left at the second path.
    """
    path = tmp_path / "run"
    saved_serially(path, "sgd", 1)
    assert outcomes(1, killed, path, where, nth) == [(False, "died without a word")]
    assert difference(loaded(path), serial("sgd", steps)[0]) == 0
    saved_serially(path, "sgd", 3)
    assert difference(loaded(path), serial("sgd", 3)[0]) == 0
    assert not (tmp_path / ".run.old").exists()


ERRORS = {
    "raises": OSError("the cable is loose"),
    "full": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    # What PyTorch's writer says of a full disk.
    "writer": RuntimeError("[enforce fail] . unexpected pos 704 vs 598"),
}


def failing(path: Path, how: str) -> Any:
    """The second save fails on rank 1; what was said on this rank."""
    model, optimizer = trained(split(2, 0), "adam", 1)
    hetconv.save_checkpoint(path, model, optimizer)
    train(model, optimizer, range(1, 2))
    writer: Any = checkpoint.FileSystemWriter

    class Failing(writer):
        def write_data(self, plan: Any, planner: Any) -> Any:
            super().write_data(plan, planner)
            if how == "dies":
                os._exit(1)
            raise ERRORS[how]

    instead = {"elsewhere": lambda _: writer(path.with_name("elsewhere"))}.get(
        how, Failing
    )
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(checkpoint, "FileSystemWriter", instead)
        return told(hetconv.save_checkpoint, path, model, optimizer)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", ["HetConvError", "failed on rank 1", "the cable is loose"]),
        ("full", ["HetConvError", "since the disk is full: free", "on rank 1"]),
        ("writer", ["HetConvError", "since the disk is full: free", "on rank 1"]),
        ("elsewhere", ["HetConvError", "on rank 0", "__1_0.distcp", "all ranks share"]),
    ],
)
def test_a_save_that_fails_on_one_rank_fails_on_all(
    how: str, words: list[str], tmp_path: Path
) -> None:
    said = on_ranks(2, failing, tmp_path / "run", how)
    assert said[0] == said[1]
    assert all(word in said[0] for word in words), said
    assert difference(loaded(tmp_path / "run"), serial("adam", 1)[0]) <= 1e-9
    assert {p.name for p in tmp_path.iterdir()} <= {"run", "elsewhere"}


def test_a_save_in_which_a_rank_dies(tmp_path: Path) -> None:
    (survived, said), (died, _) = outcomes(2, failing, tmp_path / "run", "dies")
    assert survived
    assert said.startswith("LostRankError")
    assert not died
    assert difference(loaded(tmp_path / "run"), serial("adam", 1)[0]) <= 1e-9


def refused(path: Path, how: str) -> Any:
    """What was said to this rank, and by how much anything changed."""
    model, optimizer = trained(split(2, 0), "adam", 1)
    hetconv.save_checkpoint(path, model, None if how == "no optimizer" else optimizer)
    train(model, optimizer, range(1, 2))
    before = [
        hetconv.full_state_dict(model),
        hetconv.full_optim_state_dict(model, optimizer),
    ]
    odd = dist.get_rank() == 1
    if odd and how == "truncated":
        os.truncate(path / "__0_0.distcp", 100)
    if odd and how == "no metadata":
        (path / ".metadata").unlink()
    dist.barrier()
    if how == "no path" or (how == "another path" and odd):
        path = path / "none"
    target = (
        torch.optim.Adam(model.parameters()) if how == "other groups" else optimizer
    )
    if how == "not a checkpoint":
        said = told(hetconv.save_checkpoint, path.parent, model)
    else:
        said = told(hetconv.load_checkpoint, path, model, target)
    after = [
        hetconv.full_state_dict(model),
        hetconv.full_optim_state_dict(model, optimizer),
    ]
    return said, difference(before, after)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no path", ["on rank 0", "run/none", "is no checkpoint"]),
        ("no metadata", ["on rank 0", "is no checkpoint"]),
        ("another path", ["on rank 1", "run/none"]),
        ("truncated", ["loading", "failed on rank"]),
        ("no optimizer", ["has no state of an optimizer"]),
        ("other groups", ["2 groups of parameters, expected 1"]),
        ("not a checkpoint", ["is not a checkpoint", "an empty directory"]),
    ],
)
def test_what_cannot_be_loaded_is_refused_on_every_rank(
    how: str, words: list[str], tmp_path: Path
) -> None:
    (said, changed), other = on_ranks(2, refused, tmp_path / "run", how)
    assert (said, changed) == other
    assert all(word in said for word in ["HetConvError", *words]), said
    assert changed == 0


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 6, 5, padding=2), nn.GroupNorm(2, 6)
        self.more = nn.Linear(2, 2)


def of_another_model(path: Path) -> Any:
    model = split(2, 0)
    before = hetconv.full_state_dict(model)
    return told(hetconv.load_checkpoint, path, model), difference(
        before, hetconv.full_state_dict(model)
    )


def test_the_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    hetconv.save_checkpoint(tmp_path / "run", Other())
    os.truncate(tmp_path / "run" / "__0_0.distcp", 0)  # the metadata is enough to tell
    for said, changed in on_ranks(2, of_another_model, tmp_path / "run"):
        statistics = "num_batches_tracked", "running_mean", "running_var"
        assert f"missing {[f'norm.{name}' for name in statistics]}" in said
        assert "unknown ['more.bias', 'more.weight']" in said
        assert "['one.weight: (6, 3, 5, 5), expected (6, 3, 3, 3)']" in said
        assert changed == 0
