"""Decisions that are made once for each signature of tensors, and remembered."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

MAX_DECISIONS = 4096
K = TypeVar("K")
V = TypeVar("V")
_generation = 0


def signature(t: Tensor | None) -> tuple[Any, ...] | None:
    """Returns what decisions about a tensor depend on, but for its address."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device)


def generation() -> int:
    """Returns a number for the keys of remembered decisions.

    It changes when something changes that they depend on and that is not in the key.
    """
    return _generation


def forget_decisions() -> None:
    """Makes decisions that were remembered under `generation` out of date."""
    global _generation
    _generation += 1


def remember(decisions: dict[K, V], key: K, decision: V) -> None:
    """Adds a decision to others; all are forgotten before they become too many."""
    if len(decisions) >= MAX_DECISIONS:
        decisions.clear()
    decisions[key] = decision
