"""Objects with tensors, sent between processes of one host.

An object is pickled. The bytes of its tensors lie in memory that both processes map.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetconv.errors import HetConvError
from hetconv.torch_internals import storage_id

ALIGNMENT = 64  # of a tensor's bytes; more than any data type needs
MAIN = ("__main__", "__mp_main__")  # `multiprocessing` calls an imported one so


class SharedMemory:
    """Memory without a name in the file system: it goes with the last process that maps it.

    Args:
        descriptor: An open file of it; None for new memory.
    """

    def __init__(self, descriptor: int | None = None):
        if descriptor is None:
            descriptor = os.memfd_create("hetconv-workers")
        self.descriptor = descriptor
        self._mapped = torch.empty(0, dtype=torch.uint8, device="cpu")

    def bytes(self, size: int) -> Tensor:
        """Returns the first ``size`` bytes; there are as many from then on."""
        if size > len(self._mapped):
            there = os.fstat(self.descriptor).st_size
            if there < size:
                os.ftruncate(self.descriptor, size)
            mapped = mmap.mmap(self.descriptor, max(there, size))
            self._mapped = torch.frombuffer(mapped, dtype=torch.uint8)
        return self._mapped[:size]

    def unmap(self) -> None:
        """Unmaps it from this process."""
        self._mapped = self._mapped[:0].clone()

    def clear(self) -> None:
        """Gives all of it back to the system; no process may have it mapped."""
        self.unmap()
        os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        """Closes it in this process."""
        self.unmap()
        os.close(self.descriptor)


@dataclass(frozen=True)
class Packed:
    """An object that was packed.

    Attributes:
        pickled: The object without the bytes of its tensors.
        size: Bytes of its tensors.
        device: Device of its first tensor, as text; None if it has none.
        requires_grad: Whether one of its tensors requires a gradient.
        of_main: Names of classes and functions of the program's main module that it uses.
    """

    pickled: bytes
    size: int
    device: str | None
    requires_grad: bool
    of_main: tuple[str, ...]


class _Stored(NamedTuple):
    """Where the bytes of a tensor's storage are."""

    start: int
    size: int


def pack(what: str, value: Any, memory: SharedMemory, *, views: bool = False) -> Packed:
    """Packs an object. Its tensors' bytes are copied into memory, where the last ones lay.

    Args:
        what: The object in an error message.
        value: The object.
        memory: Memory that the receiver maps too.
        views: Whether tensors that share memory do so afterwards. Otherwise, of a larger
            tensor's memory only what a view shows is sent.

    Raises:
        HetConvError: It cannot be pickled.
    """
    packer = _Packer(views)
    try:
        packer.dump(value)
    except HetConvError:
        raise
    except Exception as e:  # what pickling calls may raise anything
        raise HetConvError(
            f"{what} cannot be sent to the workers, which are other processes, for it cannot "
            f"be pickled: {type(e).__name__}: {e}. Use classes and functions that modules "
            "define by name, without locks, open files, lambdas and local functions"
        ) from e
    target = memory.bytes(packer.size)
    for place, source in packer.sources:
        target[place.start : place.start + place.size].copy_(source)
    return Packed(
        packer.pickled.getvalue(),
        packer.size,
        packer.device,
        packer.requires_grad,
        tuple(packer.of_main),
    )


def unpack(packed: Packed, memory: SharedMemory, device: torch.device) -> Any:
    """Returns a packed object, with tensors of its own on a device.

    Args:
        packed: What the sender packed.
        memory: Memory that the sender used.
        device: Where all tensors are to be.
    """
    return _Unpacker(packed, memory.bytes(packed.size), device).load()


class _Packer(pickle.Pickler):
    def __init__(self, views: bool):
        self.pickled = io.BytesIO()
        super().__init__(self.pickled, protocol=pickle.HIGHEST_PROTOCOL)
        self.sources: list[tuple[_Stored, Tensor]] = []
        self.size, self.requires_grad = 0, False
        self.device: str | None = None
        self.of_main: dict[str, None] = {}
        self._views = views
        self._places: dict[int, _Stored] = {}

    def persistent_id(self, obj: Any) -> tuple[int, ...] | None:
        return tuple(obj) if type(obj) is _Stored else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            self.device = self.device or str(obj.device)
            self.requires_grad |= obj.requires_grad
            if type(obj) is Tensor and _has_plain_bytes(obj):
                return self._reduced(obj.detach())
        elif isinstance(obj, (type, FunctionType)) and obj.__module__ in MAIN:
            self.of_main[obj.__qualname__] = None
        return NotImplemented

    def _reduced(self, x: Tensor) -> tuple[Any, ...]:
        x = x.resolve_conj().resolve_neg()
        if not self._views and x.untyped_storage().nbytes() > x.nbytes:
            x = x.clone()
        place = self._place(x)
        return _tensor, (place, x.dtype, x.size(), x.stride(), x.storage_offset())

    def _place(self, x: Tensor) -> _Stored:
        key = storage_id(x)
        if key not in self._places:
            raw = torch.empty(0, dtype=torch.uint8, device=x.device)
            raw.set_(x.untyped_storage())
            place = _Stored(self.size, raw.nbytes)
            self._places[key] = place
            self.sources.append((place, raw))  # kept, so that no other one gets the key
            self.size += -(-raw.nbytes // ALIGNMENT) * ALIGNMENT
        return self._places[key]


def _has_plain_bytes(x: Tensor) -> bool:
    if x.is_meta:
        raise HetConvError(
            f"a tensor of shape {tuple(x.shape)} is on the meta device and has no numbers; "
            "load the weights before the model is sent to the workers"
        )
    return x.layout == torch.strided and not x.is_quantized and not x.is_nested


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: torch.Size,
    stride: tuple[int, ...],
    offset: int,
) -> Tensor:
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset, size, stride)


class _Unpacker(pickle.Unpickler):
    def __init__(self, packed: Packed, memory: Tensor, device: torch.device):
        super().__init__(io.BytesIO(packed.pickled))
        self._memory, self._device = memory, device
        self._storages: dict[_Stored, torch.UntypedStorage] = {}

    def persistent_load(self, pid: Any) -> torch.UntypedStorage:
        place = _Stored(*pid)
        if place not in self._storages:
            source = self._memory[place.start : place.start + place.size]
            copy = torch.empty_like(source, device=self._device).copy_(source)
            self._storages[place] = copy.untyped_storage()
        return self._storages[place]
