"""One word from every rank before anything moves: all go on, or all raise the same
error. No rank is left waiting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from hetconv import errors
from hetconv.errors import DisagreementError, HetConvError

from . import call_tags
from .rank_group import RankGroup, all_gather_object, all_gather_small

T = TypeVar("T")


def assert_consensus(
    group: RankGroup, what: str, saying: str, error: HetConvError | None = None
) -> None:
    """Collective. Every rank says what it is about to do; unless all say the same and
    none has an error, all raise.

    ``what`` names the operation, and messages belong to it from now on. With an error
    on any rank, the first one is raised on every rank, with its rank named; otherwise
    ranks that differ raise `DisagreementError` with what each said and where in its
    program.
    """
    if group.size == 1:
        if error is not None:
            raise error
        return
    call_tags.enter_step(what)
    group.agreements.count += 1
    digest = hashlib.sha256(f"{what}|{saying}|{error!r}".encode()).digest()
    word = torch.frombuffer(
        bytearray(digest + bytes([error is not None])), dtype=torch.uint8
    )
    if bool((all_gather_small(group, word) == word).all()) and error is None:
        return
    place = call_tags.user_code()
    told = (
        what,
        f"{saying}, {place}",
        type(error).__name__ if error else "",
        str(error) if error else "",
    )
    all_told = all_gather_object(group, told)
    for rank, (where, _, kind, message) in enumerate(all_told):
        if kind:
            raise getattr(errors, kind, HetConvError)(
                f"{where}, on rank {rank}: {message}"
            )
    lines = "\n".join(
        f"  rank {rank}: {where}: {said}"
        for rank, (where, said, _, _) in enumerate(all_told)
    )
    raise DisagreementError(
        f"the ranks do not agree on what to do; call it alike on every rank:\n{lines}"
    )


def validate_together(
    group: RankGroup, what: str, prepare: Callable[[], T], saying: Callable[[T], str]
) -> T:
    """Runs ``prepare``, which checks arguments and moves nothing, on every rank; all go
    on with its result or none.

    An error of any other kind, such as an argument of a wrong type, becomes a
    `HetConvError` on every rank.
    """
    try:
        result = prepare()
        said = saying(result)
    except Exception as e:
        assert_consensus(
            group,
            what,
            "",
            e
            if isinstance(e, HetConvError)
            else HetConvError(f"{type(e).__name__}: {e}"),
        )
        raise  # not reached: with an error on this rank, agree raises on every rank
    assert_consensus(group, what, said)
    return result


def checksum(x: Tensor) -> int:
    """The sum of the bytes: exact, where a floating sum depends on the order that each
    device adds in.
    """
    return (
        int(x.detach().reshape(-1).view(torch.uint8).sum())
        if x.layout == torch.strided
        else 0
    )
