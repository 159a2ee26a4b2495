"""Consensus of all ranks before anything is sent: all go on, or all raise the same error."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from hetconv import errors
from hetconv.errors import DisagreementError, HetConvError

from . import call_tags
from .rank_group import RankGroup, all_gather_object, start_all_gather_small

T = TypeVar("T")


def assert_consensus(
    group: RankGroup, what: str, saying: str, error: HetConvError | None = None
) -> None:
    """Raises the same error on all ranks unless all are about to do the same. Collective.

    Args:
        group: the ranks.
        what: name of the operation. Messages that follow belong to it.
        saying: what must be equal on all ranks, such as shapes and options.
        error: an error of this rank, if its arguments are wrong.

    Raises:
        HetConvError: the error of the first rank that has one, with its rank.
        DisagreementError: ranks differ; it has what each said, and its line of code.
    """
    start_consensus(group, what, saying, error)()


def start_consensus(
    group: RankGroup, what: str, saying: str, error: HetConvError | None = None
) -> Callable[[], None]:
    """Starts `assert_consensus`, and returns a function that waits for it, and may raise.

    What this rank does meanwhile may be something else than what the others do.
    """
    if group.size == 1:
        if error is not None:
            raise error
        return lambda: None
    call_tags.enter_step(what)
    group.agreements.count += 1
    digest = hashlib.sha256(f"{what}|{saying}|{error!r}".encode()).digest()
    word = torch.frombuffer(
        bytearray(digest + bytes([error is not None])), dtype=torch.uint8
    )
    gathered = start_all_gather_small(group, word)

    def check() -> None:
        if bool((gathered() == word).all()) and error is None:
            return
        _raise_disagreement(group, what, saying, error)

    return check


def _raise_disagreement(
    group: RankGroup, what: str, saying: str, error: HetConvError | None
) -> NoReturn:
    """Raises the first rank's error, or what each rank said; collective."""
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
    """Checks arguments on every rank; all ranks go on, or all raise. Collective.

    Args:
        group: the ranks.
        what: name of the operation.
        prepare: checks arguments and sends nothing. An error of another kind than
            `HetConvError` becomes one, on every rank.
        saying: what must be equal on all ranks, from the result of ``prepare``.

    Returns:
        The result of ``prepare``.

    Raises:
        HetConvError: see `assert_consensus`.
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
    """Returns the sum of the bytes of a tensor, which is exact on every device."""
    return (
        int(x.detach().reshape(-1).view(torch.uint8).sum())
        if x.layout == torch.strided
        else 0
    )
