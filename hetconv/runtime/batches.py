"""The same batches on all ranks of a split model."""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import data
from torch.utils.data import DistributedSampler

from hetconv.comm.consensus import validate_together
from hetconv.comm.rank_group import (
    RankGroup,
    all_gather_object,
    broadcast,
    rank_group_of,
    translate_backend_errors,
)
from hetconv.containers import tensors_in
from hetconv.errors import DisagreementError, HetConvError
from hetconv.torch_internals import keystr, tree_flatten_with_path

T = TypeVar("T")
NAME = "same_batches"
COMPARED = (bool, int, float, complex, str, bytes, type(None))
"""Types whose values are compared; of other objects the tensors inside are."""
_END: Any = object()
_PIPES = tuple(
    kind
    for name in ("IterDataPipe", "MapDataPipe")  # which PyTorch may drop
    if (kind := getattr(data, name, None)) is not None
)


def same_batches(
    loader: Iterable[T], *, group: dist.ProcessGroup | None = None, check: bool = False
) -> SameBatches[T]:
    """Makes a loader that yields the same batches on all ranks of a split model; collective.

    Ranks of a split model must be given the same batches, but their loaders may shuffle or
    augment in ways of their own. By default rank 0 alone iterates over its loader, and sends
    each batch to the others, with the state of torch's random numbers, so that all ranks go
    on drawing alike. Then a step that all ranks must take together is each batch of an
    epoch; leave the loop after the same batch on all ranks.

    Args:
        loader: What yields batches, such as a `torch.utils.data.DataLoader`. A batch may be
            any object that can be pickled. Its tensors stay on the CPU, or are put on the
            current GPU of each rank.
        group: The ranks; all of them by default.
        check: Whether every rank yields its own batches, and all ranks compare checksums of
            them, which costs less than sending large batches.

    Returns:
        A loader with the length of rank 0's, or with ``check`` of this rank's, and with the
        attributes of ``loader``, such as ``dataset``.

    Raises:
        HetConvError: While iterating, on every rank, if a loader raises an error on one.
        DisagreementError: While iterating, on every rank, if with ``check`` batches differ
            or a loader ends before the others; it says what each rank has. Also if ranks
            take different steps, or options.

    Example:
        >>> loader = hetconv.same_batches(DataLoader(dataset, 32, shuffle=True))
        >>> for images, labels in loader:
        ...     loss = F.cross_entropy(model(images), labels)
    """
    return SameBatches(loader, rank_group_of(group), check)


class SameBatches(Generic[T]):
    """What `same_batches` returns."""

    def __init__(self, loader: Iterable[T], group: RankGroup, check: bool):
        self._loader, self._check = loader, check
        # Batches mostly lie in host memory, and ranks may have devices of several kinds.
        self._group = replace(group, process_group=group.control, backend="gloo")
        validate_together(group, NAME, self._check_loader, lambda _: f"check={check}")
        self._first_length = all_gather_object(group, _length(loader))[0]

    def _check_loader(self) -> None:
        sampler = getattr(self._loader, "sampler", None)
        replicas = dist.get_world_size() // self._group.size
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > replicas:
            raise HetConvError(
                f"the loader's DistributedSampler leaves each of {sampler.num_replicas} ranks a "
                f"part of the data, but the {self._group.size} ranks of a split model compute "
                f"each batch together; leave it out, or give it num_replicas={replicas}"
            )
        pipe = getattr(self._loader, "dataset", None)
        if isinstance(pipe, _PIPES) and not self._check:
            raise HetConvError(
                f"a DataLoader over a {type(pipe).__name__} seeds it on all ranks together, but "
                "rank 0 alone would iterate; give check=True"
            )

    def __iter__(self) -> Iterator[T]:
        iterates = self._check or self._group.rank == 0
        own = self._own_batches() if iterates else iter(())
        step = self._checked if self._check else self._sent
        for number in count():
            batch = step(own, number)
            if batch is _END:
                return
            yield batch

    def __len__(self) -> int:
        if self._check or self._first_length is None:
            return len(self._loader)  # type: ignore[arg-type]
        return self._first_length

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy is not filled yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def _own_batches(self) -> Iterator[T]:
        # An error of iter() is then one of the first batch, and told on all ranks.
        yield from self._loader

    def _checked(self, own: Iterator[T], number: int) -> T:
        """Returns this rank's next batch, or `_END`, as all ranks have it; collective."""
        try:
            return validate_together(
                self._group,
                NAME,
                lambda: next(own, _END),
                lambda batch: f"batch {number}: {_described(batch)}",
            )
        except DisagreementError as e:
            raise DisagreementError(
                f"the loaders of the ranks differ; seed them alike, or leave check out: {e}"
            ) from None

    def _sent(self, own: Iterator[T], number: int) -> T:
        """Returns rank 0's next batch, or `_END`; collective."""
        group = self._group
        batch, content, tensors = validate_together(
            group,
            NAME,
            lambda: _packed(next(own, _END)) if group.rank == 0 else (_END, b"", []),
            lambda _: f"batch {number}",
        )
        word = [(content, torch.get_rng_state())]
        translate_backend_errors(
            group,
            lambda: dist.broadcast_object_list(word, group=group.control, group_src=0),
        )
        if group.rank > 0:
            content, random_state = word[0]
            torch.set_rng_state(random_state)
            batch, tensors = _unpacked(content)
        if tensors:
            broadcast(group, tensors)
        return batch  # type: ignore[no-any-return]


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # of a loader without a length
        return None


class _Packer(pickle.Pickler):
    """Pickles all but the elements of plain tensors, which are sent by themselves."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.tensors: dict[int, tuple[int, Tensor]] = {}  # by id, with their number

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided:
            return None
        if id(value) in self.tensors:
            return self.tensors[id(value)][0]
        self.tensors[id(value)] = len(self.tensors), value
        like = torch.empty_like(
            value, device="meta"
        )  # dense, in the same memory format
        return like.shape, like.stride(), value.dtype, value.device.type


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_load(self, found: Any) -> Tensor:
        if isinstance(found, int):
            return self.tensors[found]
        shape, stride, dtype, kind = found
        device = "cuda" if kind == "cuda" and torch.cuda.is_available() else "cpu"
        made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        self.tensors.append(made)
        return made


def _packed(batch: Any) -> tuple[Any, bytes, list[Tensor]]:
    """Returns a batch, what is pickled of it, and its plain tensors."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(None if batch is _END else (batch,))
    return batch, file.getvalue(), [x for _, x in packer.tensors.values()]


def _unpacked(content: bytes) -> tuple[Any, list[Tensor]]:
    """Returns the batch, or `_END`, and its plain tensors, which are not filled yet."""
    unpacker = _Unpacker(io.BytesIO(content))
    found = unpacker.load()
    return _END if found is None else found[0], unpacker.tensors


def _described(batch: Any) -> str:
    """Describes a batch, with checksums, for a comparison."""
    if batch is _END:
        return "no batch left"
    leaves = tree_flatten_with_path(batch)[0]
    return ", ".join(f"{keystr(path)} {_leaf(x)}".strip() for path, x in leaves)


def _leaf(x: Any) -> str:
    if isinstance(x, Tensor) and x.layout == torch.strided:
        flat = x.detach().as_subclass(Tensor).cpu().contiguous().reshape(-1)
        crc = zlib.crc32(flat.view(torch.uint8).numpy().data)
        return f"{tuple(x.shape)} {x.dtype} with checksum {crc:08x}"
    if isinstance(x, np.ndarray) and not x.dtype.hasobject:
        crc = zlib.crc32(np.ascontiguousarray(x).data)
        return f"{x.shape} {x.dtype} with checksum {crc:08x}"
    if isinstance(x, COMPARED):
        return repr(x)
    inside = [t for t in tensors_in(x, opaque=True) if t is not x]
    return f"{type(x).__name__}({', '.join(map(_leaf, inside))})"
