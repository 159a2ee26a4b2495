"""Tiles that were tuned on a device, by problem."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import torch

from hetconv.kernels.launchers.decisions import forget_decisions
from hetconv.sharding.conv_spec import ConvSpec

from .tile import Pass, Tile

Entry = Tile | Literal["aten"]
Problem = tuple[Pass, ConvSpec, str]  # the last: "ieee" or "tf32"
_installed: dict[tuple[str, str, str], dict[Problem, Entry]] = {}


def install(
    entries: Mapping[Problem, Entry],
    device: str,
    versions: tuple[str, str] | None = None,
) -> None:
    """Makes these tiles, or ATen, compute these problems on devices of this name.

    Args:
        entries: What computes each problem.
        device: Name of the GPU.
        versions: Of torch and triton that the entries were measured with; under others
            they are ignored. Those in use by default.
    """
    key = (device, *(versions or versions_in_use()))
    _installed.setdefault(key, {}).update(entries)
    forget_decisions()


def any_installed() -> bool:
    """Returns whether anything was installed, for whatever device."""
    return bool(_installed)


def tuned_entry(
    device: str, pass_name: Pass, spec: ConvSpec, precision: str
) -> Entry | None:
    """Returns what was installed for a problem on this device and these versions."""
    if not _installed:
        return None
    entries = _installed.get((device, *versions_in_use()), {})
    return entries.get((pass_name, spec, precision))


@lru_cache
def versions_in_use() -> tuple[str, str]:
    """Returns the versions of torch and triton.

    Raises:
        ImportError: Triton is not installed.
    """
    import triton

    return str(torch.__version__), triton.__version__
