"""Packing of boxes of images into messages, and unpacking, each in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from hetconv.errors import KernelError

from .checks import describe
from .concat import MAX_PARTS, is_one_run, moves_by_triton
from .launch import VECTOR_BYTES, LaunchSequence, StridedLayout


@torch.no_grad()
def pack(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Returns every piece as a message: contiguous, (N, h, w, c), without autograd.

    Pieces that lie so already are returned as views. The others are copied, bit by bit,
    into one new buffer, one after the other, each from a multiple of 16 bytes on. On
    CUDA, and under ``set_backend("triton")``, a Triton kernel copies those whose
    channels lie side by side, up to 16 in one launch; ATen copies the rest, and
    elsewhere all.

    Args:
        pieces: Tensors (N, c, h, w) with one data type and device; any may be empty.

    Raises:
        KernelError: The pieces do not fit each other.
    """
    for i, p in enumerate(pieces):
        if p.dim() != 4:
            raise KernelError(
                f"piece {i} is {describe(p)}, but a piece is (N, c, h, w); give views of images"
            )
        _check_alike(f"piece {i}", p, "piece 0", pieces[0])
    messages = [p.movedim(1, -1) for p in pieces]
    copied = [i for i, m in enumerate(messages) if not m.is_contiguous()]
    if copied:
        like = pieces[0]
        step = max(VECTOR_BYTES // like.element_size(), 1)
        room = [-(-messages[i].numel() // step) * step for i in copied]
        *starts, total = accumulate(room, initial=0)
        buffer = torch.empty(total, dtype=like.dtype, device=like.device)
        for i, start in zip(copied, starts, strict=True):
            part = buffer[start : start + messages[i].numel()]
            messages[i] = part.view(messages[i].shape)
        targets = [messages[i].movedim(-1, 1) for i in copied]
        _move([pieces[i] for i in copied], targets, add=False)
    return messages


@torch.no_grad()
def unpack(
    parts: Sequence[Tensor], places: Sequence[Tensor], *, add: bool = False
) -> None:
    """Writes every part, bit by bit, into its place, or adds it, without autograd.

    On CUDA, and under ``set_backend("triton")``, a Triton kernel fills places from
    parts, up to 16 in one launch, where these are images (N, c, h, w) and the channels
    of both lie side by side; ATen fills the rest, a single place that is one run of
    memory, and elsewhere all.

    Args:
        parts: Tensors (N, c, ...) with one data type and device; any may be empty.
        places: A tensor, or view of one, for each part. None may overlap another one,
            or a part: the caller's promise.
        add: Whether a place receives what ``place.add_(part)`` gives; half types are
            added in float32 and rounded once.

    Raises:
        KernelError: Parts do not fit their places, or a place is expanded.
    """
    if len(parts) != len(places):
        raise KernelError(
            f"{len(parts)} parts were given with {len(places)} places; give one place for each part"
        )
    for i, (part, place) in enumerate(zip(parts, places, strict=True)):
        if part.shape != place.shape:
            raise KernelError(
                f"part {i} is {describe(part)} and its place {describe(place)}, but both must "
                "be of one shape"
            )
        _check_alike(f"part {i}", part, "place 0", places[0])
        _check_alike(f"place {i}", place, "place 0", places[0])
        dims = zip(place.stride(), place.shape, strict=True)
        if place.numel() and any(stride == 0 and size > 1 for stride, size in dims):
            raise KernelError(
                f"place {i} of shape {tuple(place.shape)} has strides {place.stride()}, so "
                "that several numbers would be written to one address; give a view that is "
                "not expanded"
            )
    _move(parts, places, add)


def _check_alike(name: str, t: Tensor, other: str, like: Tensor) -> None:
    if t.dtype != like.dtype or t.device != like.device:
        raise KernelError(
            f"{name} is {describe(t)}, but {other} is {describe(like)}; give all in one dtype "
            "and on one device"
        )


def _move(sources: Sequence[Tensor], targets: Sequence[Tensor], add: bool) -> None:
    pairs = [(s, t) for s, t in zip(sources, targets, strict=True) if t.numel()]
    by_triton = bool(pairs) and moves_by_triton(pairs[0][1])
    if not add and len(pairs) == 1 and is_one_run(*pairs[0]):
        by_triton = False  # one copy of memory
    launched = []
    for source, target in pairs:
        if by_triton and _channels_adjoin(source) and _channels_adjoin(target):
            launched.append((source, target))
        elif add:
            target.add_(source)
        else:
            target.copy_(source)
    for first in range(0, len(launched), MAX_PARTS):
        _launch(launched[first : first + MAX_PARTS], add)


def _channels_adjoin(t: Tensor) -> bool:
    return t.dim() == 4 and (t.shape[1] == 1 or t.stride(1) == 1)


def _launch(pairs: Sequence[tuple[Tensor, Tensor]], add: bool) -> None:
    named: dict[str, Tensor] = {}
    for i, (source, target) in enumerate(pairs):
        named |= {f"source{i}": source, f"target{i}": target}
    layouts = tuple((StridedLayout.of(s), StridedLayout.of(t)) for s, t in pairs)
    _launches(layouts, add).run(**named)


@lru_cache(4096)
def _launches(
    pairs: tuple[tuple[StridedLayout, StridedLayout], ...], add: bool
) -> LaunchSequence:
    from .triton.pack import move_launch

    return LaunchSequence((move_launch(pairs, add),))
