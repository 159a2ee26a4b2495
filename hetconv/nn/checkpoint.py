"""Checkpoints in the format of torch.distributed.checkpoint (DCP).

Each rank writes and reads its own slices.
"""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from hetconv.comm.rank_group import RankGroup, translate_backend_errors
from hetconv.errors import HetConvError
from hetconv.runtime.het_tensor import HetTensor
from hetconv.torch_internals import tree_map_only, unflatten_state_dict

from .optimizer_state import local_optim_state, sharded_optim_state_dict
from .parameters import group_of_model
from .state_dict import (
    Slice,
    State,
    agreed,
    check_fit,
    local_state,
    sharded_state_dict,
    shares,
    signature,
)

T = TypeVar("T")
METADATA = ".metadata"
"""File that a checkpoint of torch.distributed.checkpoint has once it is complete."""


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
) -> None:
    """Saves a model, and its optimizer's state, as a directory; collective.

    Each rank writes its slices, and rank 0 what is replicated. The format is that of
    ``torch.distributed.checkpoint.save({"model": ..., "optimizer": ...})`` with the
    state dicts of the plain model. Of data-parallel replicas one saves. A checkpoint at
    ``path`` is replaced once the new one is complete: after a crash `load_checkpoint`
    finds one of the two, and a directory ``.NAME.*`` beside ``path`` can be deleted.

    Args:
        path: Directory in a file system that all ranks share.
        model: A plain or parallelized model.
        optimizer: Its optimizer, if its state is to be saved.
        extra: Any object that `torch.save` takes; rank 0's is saved.

    Raises:
        HetConvError: On every rank, if writing fails on one, or if something else than a
            checkpoint is at ``path``.
    """
    group, path = group_of_model(model), Path(path).resolve()

    def prepare() -> State:
        if not _is_free(path) and not (path / METADATA).is_file():
            raise HetConvError(
                f"{path} is there and is not a checkpoint; give the path of a new or an empty "
                "directory"
            )
        state = {"model": sharded_state_dict(model)}
        if optimizer is not None:
            state["optimizer"] = sharded_optim_state_dict(model, optimizer)
        return state

    state = agreed(
        model,
        "save_checkpoint",
        prepare,
        lambda s: f"{path}, extra {extra is not None}, {signature(s)}",
    )
    state = tree_map_only(HetTensor, _own_slice, state)
    if extra is not None:
        # DCP keeps a tuple as it is, but turns the keys of a dictionary into strings.
        state["extra"] = (extra,)
    new, leads = _sibling(path, group), group is None or group.rank == 0
    try:
        _by_dcp(group, f"saving {path}", lambda: _write(state, new, group))
        agreed(
            model,
            "save_checkpoint",
            lambda: _replace(path, new) if leads else None,
            lambda _: "written",
        )
    except BaseException:
        if leads:
            shutil.rmtree(new, ignore_errors=True)
        raise


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    missing_ok: bool = False,
) -> Any:
    """Loads a checkpoint, which may have been saved under another plan; collective.

    It may also be one that ``torch.distributed.checkpoint.save`` wrote of a plain model,
    in the format of `save_checkpoint`. Checkpoints are unpickled: load none that you do
    not trust.

    Args:
        path: The directory that `save_checkpoint` was given.
        model: A plain or parallelized model.
        optimizer: Its optimizer, which may have made no step yet, if its state is to be
            loaded.
        missing_ok: Whether to return None, and to change nothing, where there is no
            checkpoint yet: at the first start of a program that is started again after
            a failure.

    Returns:
        The ``extra`` that was saved, or None.

    Raises:
        HetConvError: On every rank, before anything changes, if the checkpoint cannot
            be read or does not fit.
    """
    group, path = group_of_model(model), _readable(Path(path).resolve())

    def prepare() -> tuple[Metadata, State] | None:
        if missing_ok and _is_free(path):
            return None
        metadata = _metadata(path)
        return metadata, _targets(metadata, model, optimizer)

    found = agreed(
        model,
        "load_checkpoint",
        prepare,
        lambda found: f"{path}, {signature(found[1]) if found else 'nothing there'}",
    )
    if found is None:
        return None
    metadata, flat = found
    _by_dcp(group, f"loading {path}", lambda: _read(flat, path, group))
    # DCP drops empty dictionaries.
    state = {"model": {}} | unflatten_state_dict(flat, metadata.planner_data)

    def local_states() -> tuple[State, State]:
        own = local_state(model, state["model"])
        if optimizer is None:
            return own, {}
        optim_state = {"state": {}} | state["optimizer"]
        return own, local_optim_state(model, optimizer, optim_state)

    own, own_optim = agreed(model, "load_checkpoint", local_states, lambda _: "read")
    model.load_state_dict(own)
    if optimizer is not None:
        optimizer.load_state_dict(own_optim)
    return state["extra"][0] if "extra" in state else None


class _Slice(Slice):
    """Slice that implements DCP's protocol `_Checkpointable`: a rank writes its own box."""

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        box = self.box  # an empty one would share its offset with its neighbour
        return (
            [ChunkStorageMetadata(torch.Size(box.lo), torch.Size(box.shape))]
            if box.numel
            else []
        )

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local


def _own_slice(x: HetTensor) -> _Slice:
    return _Slice.of(x.local, x.placement.boxes[x.group.rank], x.placement.shape)


def _write(state: State, path: Path, group: RankGroup | None) -> None:
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    save(state, storage_writer=FileSystemWriter(path), planner=planner, **_among(group))


def _read(state: State, path: Path, group: RankGroup | None) -> None:
    load(state, storage_reader=FileSystemReader(path), **_among(group))


def _among(group: RankGroup | None) -> dict[str, Any]:
    return {"process_group": group.control} if group is not None else {"no_dist": True}


def _by_dcp(group: RankGroup | None, what: str, action: Callable[[], T]) -> T:
    """Runs an action of DCP, and raises its errors as `HetConvError`.

    DCP raises on all ranks if one failed.
    """
    try:
        with warnings.catch_warnings():
            # Without a group torch.distributed is not used, which DCP warns of.
            warnings.filterwarnings(
                "ignore", "torch.distributed is disabled", UserWarning
            )
            if group is None:
                return action()
            return translate_backend_errors(group, action)
    except CheckpointException as e:
        failed = [(rank, e.failures[rank][0]) for rank in sorted(e.failures)]
        failures = "; ".join(f"on rank {r}: {type(x).__name__}: {x}" for r, x in failed)
        if any(_is_full(x) for _, x in failed):
            failures = (
                f"since the disk is full: free space on it, or save elsewhere; a checkpoint that "
                f"was there before is unchanged ({failures})"
            )
        raise HetConvError(f"{what} failed {failures}") from e


def _is_full(error: BaseException) -> bool:
    """Whether a disk is full: PyTorch's writer then says where it is in its file."""
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    return full or "unexpected pos" in str(error)


def _sibling(path: Path, group: RankGroup | None) -> Path:
    """Returns a path that no other save uses, the same on every rank."""
    name = [f".{path.name}.{uuid4().hex[:8]}"]
    if group is not None:
        translate_backend_errors(
            group,
            lambda: dist.broadcast_object_list(name, group=group.control, group_src=0),
        )
    return path.with_name(name[0])


def _replace(path: Path, new: Path) -> None:
    """Moves ``new`` to ``path``; meanwhile an old checkpoint is there or at `_backup`."""
    storage: dict[Any, Any] = _metadata(new).storage_data
    files = {x.relative_path for x in storage.values()}
    if lost := sorted(name for name in files if not (new / name).is_file()):
        raise HetConvError(
            f"rank 0 does not find {lost} in {new}; give a path in a file system that all "
            "ranks share"
        )
    if path.exists():
        shutil.rmtree(_backup(path), ignore_errors=True)
        path.rename(_backup(path))
    new.rename(path)
    shutil.rmtree(_backup(path), ignore_errors=True)


def _backup(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _is_free(path: Path) -> bool:
    """Whether nothing is at ``path``, or an empty directory."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _readable(path: Path) -> Path:
    return path if path.exists() or not _backup(path).exists() else _backup(path)


def _metadata(path: Path) -> Metadata:
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as e:
        raise HetConvError(
            f"{path}: is no checkpoint ({type(e).__name__}: {e}); give the path that "
            "hetconv.save_checkpoint was given"
        ) from e


def _targets(
    metadata: Metadata, model: nn.Module, optimizer: Optimizer | None
) -> State:
    """Returns what is to be read, by key: empty tensors in host memory, or None.

    They are slices for parameters that are not whole on every rank.
    """
    entries = metadata.state_dict_metadata
    sizes = {
        key: tuple(x.size) if isinstance(x, TensorStorageMetadata) else None
        for key, x in entries.items()
    }
    # Path of each key in the nested state.
    places = {key: (metadata.planner_data or {}).get(key, (key,)) for key in entries}
    of_model = [
        (key, place)
        for key, place in places.items()
        if place[0] == "model" and len(place) > 1
    ]
    check_fit(
        model,
        {place[1]: sizes[key] if len(place) == 2 else None for key, place in of_model},
    )
    if optimizer is not None and all(
        place[0] != "optimizer" for place in places.values()
    ):
        raise HetConvError(
            "the checkpoint has no state of an optimizer; load it without one"
        )
    wanted = {"model", "extra", *(["optimizer"] if optimizer is not None else [])}
    found = shares(model)

    def target(key: str) -> Tensor | None:
        entry, size = entries[key], sizes[key]
        if not isinstance(entry, TensorStorageMetadata) or size is None:
            return None
        share = next((found[name] for name in places[key][1:3] if name in found), None)
        if share is None or size != share.held.shape:
            return torch.empty(size, dtype=entry.properties.dtype, device="cpu")
        dtype = entry.properties.dtype
        local = torch.empty(share.box.shape, dtype=dtype, device="cpu")
        return _Slice.of(local, share.box, size)

    return {key: target(key) for key, place in places.items() if place[0] in wanted}
