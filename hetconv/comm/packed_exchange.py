"""Several exchanges in one round: a rank sends another one all pieces as one message."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hetconv.sharding.layout import Boxes, Shape
from hetconv.signature_cache import Cache

from .exchange import PendingExchange, from_wire, to_wire_format, wire_shape
from .exchange_plan import ExchangePlan, Slices, exchange_plan
from .rank_group import RankGroup


class Part(NamedTuple):
    """One of several exchanges.

    Attributes:
        local: What this rank holds.
        held: Box that each rank holds.
        wanted: Box that each rank wants.
    """

    local: Tensor
    held: Boxes
    wanted: Boxes


class _Plan(NamedTuple):
    """Several exchanges as one rank sees them.

    Attributes:
        plans: Of each exchange.
        sends: By receiver, the index of each exchange and the slice of its tensor.
        comes: By sender, the index of each exchange, and the number of elements and
            the shape, as it is sent, of its piece.
    """

    plans: tuple[ExchangePlan, ...]
    sends: dict[int, list[tuple[int, Slices | None]]]
    comes: dict[int, list[tuple[int, int, Shape]]]

    @staticmethod
    def of(plans: Sequence[ExchangePlan]) -> _Plan:
        sends: dict[int, list[tuple[int, Slices | None]]] = {}
        comes: dict[int, list[tuple[int, int, Shape]]] = {}
        for k, plan in enumerate(plans):
            for receiver, at in plan.sends:
                sends.setdefault(receiver, []).append((k, at))
            for sender, shape in plan.comes.items():
                piece = (k, prod(shape), wire_shape(shape))
                comes.setdefault(sender, []).append(piece)
        return _Plan(tuple(plans), sends, comes)


_plans: Cache[tuple[int, ...], _Plan] = Cache()


def exchange_together(
    group: RankGroup, parts: Sequence[Part]
) -> list[dict[int, Tensor]]:
    """Runs exchanges as one round.

    Args:
        group: The ranks.
        parts: The exchanges. None has a wider data type than the one before it, so
            that all pieces of a message are aligned.

    Returns:
        For each exchange, the pieces that other ranks hold, by sender.
    """
    each = [exchange_plan(held, wanted, group.rank) for _, held, wanted in parts]
    key = tuple(map(id, each))
    plan = _plans.current.get(key) or _plans.add(key, _Plan.of(each))
    last = parts[-1].local
    unit, size = last.dtype, last.element_size()
    outgoing = {}
    for receiver, pieces in plan.sends.items():
        flat = [
            _flat(local if at is None else local[at], unit)
            for local, at in ((parts[k].local, at) for k, at in pieces)
        ]
        outgoing[receiver] = flat[0] if len(flat) == 1 else torch.cat(flat)
    units = [part.local.element_size() // size for part in parts]
    incoming = {
        sender: (sum(numel * units[k] for k, numel, _ in pieces),)
        for sender, pieces in plan.comes.items()
    }
    messages = PendingExchange(group, last, outgoing, incoming).wait()
    found: list[dict[int, Tensor]] = [{} for _ in parts]
    for sender, coming in plan.comes.items():
        message, start = messages[sender], 0
        for k, numel, shape in coming:
            stop = start + numel * units[k]
            piece = message[start:stop].view(parts[k].local.dtype).view(shape)
            found[k][sender], start = from_wire(piece), stop
    return found


def _flat(piece: Tensor, unit: torch.dtype) -> Tensor:
    """Returns a piece as a vector, as it is sent, of elements of another data type."""
    flat = to_wire_format(piece).reshape(-1)
    return flat if flat.dtype == unit else flat.view(unit)
