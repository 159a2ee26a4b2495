"""State of a module that decides whether a captured step still fits it."""

from __future__ import annotations

from torch import Tensor, nn

HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""Attributes of a module with what runs in its calls, or in their backward."""


def has_hooks(module: nn.Module) -> bool:
    """Returns whether hooks run in a call of a module, or in its backward."""
    return any(vars(module)[name] for name in HOOKS)


def modes_and_tensors(module: nn.Module) -> tuple[list[int], list[Tensor]]:
    """Returns what tells one state of a module from another one.

    It is read before every call of a captured step, so that it must not take long.

    Args:
        module: A module.

    Returns:
        Ids, training modes and numbers of hooks of it and all modules within; and their
        parameters, of which those with shards are slices, and buffers.
    """
    modes: list[int] = []
    tensors: list[Tensor | None] = []
    left: list[nn.Module | None] = [module]
    seen: set[int] = set()
    while left:
        own = left.pop()
        if own is None or id(own) in seen:
            continue
        seen.add(id(own))
        found = vars(own)
        modes += (id(own), found["training"], *[len(found[name]) for name in HOOKS])
        # dict.values gives slices where a module would read its parameters whole.
        tensors += dict.values(found["_parameters"])
        tensors += found["_buffers"].values()
        left += found["_modules"].values()
    return modes, [x for x in tensors if x is not None]
