"""`pack` and `unpack`: all boxes of an exchange to their messages, and from them to
their places, in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from hetconv.errors import KernelError

from .concat import MOST_PARTS, refusal
from .dispatch import obstacle, said, wants_triton
from .launch import Memory, Program


@torch.no_grad()
def pack(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Every piece (N, c, h, w) as it travels: contiguous, (N, h, w, c). Without autograd.

    Those that lie so already are returned as views. The others are copied, bit by bit,
    into one new buffer, one after the other, each from a multiple of 16 bytes on. The
    pieces share dtype and device; any may be empty.

    On CUDA, and under ``set_backend("triton")``, a Triton kernel copies those whose
    channels lie beside each other, up to 16 in one launch; ATen copies the rest, and
    elsewhere all. Raises `KernelError` for pieces that do not fit each other.
    """
    for i, p in enumerate(pieces):
        if p.dim() != 4:
            raise KernelError(
                f"piece {i} is {said(p)}, but a piece is (N, c, h, w); give views of images"
            )
        _check_alike(f"piece {i}", p, "piece 0", pieces[0])
    wires = [p.movedim(1, -1) for p in pieces]
    strewn = [i for i, w in enumerate(wires) if not w.is_contiguous()]
    if strewn:
        like, step = pieces[0], max(16 // pieces[0].element_size(), 1)
        room = [-(-wires[i].numel() // step) * step for i in strewn]
        *starts, total = accumulate(room, initial=0)
        buffer = torch.empty(total, dtype=like.dtype, device=like.device)
        for i, start in zip(strewn, starts, strict=True):
            wires[i] = buffer[start : start + wires[i].numel()].view(wires[i].shape)
        _move(
            [pieces[i] for i in strewn],
            [wires[i].movedim(-1, 1) for i in strewn],
            add=False,
        )
    return wires


@torch.no_grad()
def unpack(
    parts: Sequence[Tensor], places: Sequence[Tensor], *, add: bool = False
) -> None:
    """Writes every part (N, c, ...), bit by bit, into its place, a view of that shape;
    or adds it. Without autograd.

    With ``add`` a place receives what ``place.add_(part)`` gives: half types are added
    in float32 and rounded once. Parts and places share dtype and device; any may be
    empty. No place may overlap another one, or a part: the caller's promise.

    On CUDA, and under ``set_backend("triton")``, a Triton kernel fills places from
    parts as they arrive, or as they lie in a larger tensor, up to 16 in one launch,
    where these are images (N, c, h, w) and the channels of both lie beside each other;
    ATen fills the rest, and elsewhere all. Raises `KernelError` for parts that do not
    fit their places, and for a place that is expanded.
    """
    if len(parts) != len(places):
        raise KernelError(
            f"{len(parts)} parts were given with {len(places)} places; give one place for each part"
        )
    for i, (part, place) in enumerate(zip(parts, places, strict=True)):
        if part.shape != place.shape:
            raise KernelError(
                f"part {i} is {said(part)} and its place {said(place)}, but both must be of "
                "one shape"
            )
        _check_alike(f"part {i}", part, "place 0", places[0])
        _check_alike(f"place {i}", place, "place 0", places[0])
        if place.numel() and any(
            s == 0 and n > 1 for s, n in zip(place.stride(), place.shape, strict=True)
        ):
            raise KernelError(
                f"place {i} of shape {tuple(place.shape)} has strides {place.stride()}, so "
                "that several numbers would "
                "be written to one address; give a view that is not expanded"
            )
    _move(parts, places, add)


def _check_alike(name: str, t: Tensor, other: str, like: Tensor) -> None:
    if t.dtype != like.dtype or t.device != like.device:
        raise KernelError(
            f"{name} is {said(t)}, but {other} is {said(like)}; give all in one dtype and on "
            "one device"
        )


def _move(sources: Sequence[Tensor], targets: Sequence[Tensor], add: bool) -> None:
    pairs = [(s, t) for s, t in zip(sources, targets, strict=True) if t.numel()]
    if pairs and _by_triton(pairs[0][1]):
        ready = [pair for pair in pairs if all(map(_in_channels, pair))]
        for first in range(0, len(ready), MOST_PARTS):
            _launch(ready[first : first + MOST_PARTS], add)
        pairs = [pair for pair in pairs if not all(map(_in_channels, pair))]
    for source, target in pairs:
        target.add_(source) if add else target.copy_(source)


def _by_triton(like: Tensor) -> bool:
    return (
        wants_triton(like) and obstacle(like.device) is None and refusal([like]) is None
    )


def _in_channels(t: Tensor) -> bool:
    return t.dim() == 4 and (t.shape[1] == 1 or t.stride(1) == 1)


def _launch(pairs: Sequence[tuple[Tensor, Tensor]], add: bool) -> None:
    sources, targets = zip(*pairs, strict=True)
    named = {f"source{i}": t for i, t in enumerate(sources)} | {
        f"target{i}": t for i, t in enumerate(targets)
    }
    _moved(tuple(map(Memory.of, sources)), tuple(map(Memory.of, targets)), add).run(
        **named
    )


@lru_cache(4096)
def _moved(
    sources: tuple[Memory, ...], targets: tuple[Memory, ...], add: bool
) -> Program:
    from .triton.pack import move_recipe

    return Program((move_recipe(sources, targets, add),))
