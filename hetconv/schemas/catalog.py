"""Devices and links as their data sheets have them (``devices.json``), and how a
cluster is spelled by their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from typing import Literal

from pydantic import TypeAdapter

from hetconv.errors import ProfileError

STRICT = {"extra": "forbid"}
Nodes = tuple[tuple[str, ...], ...]  # the names of the devices in each node


@dataclass(frozen=True)
class DeviceSheet:
    """A device at its peak: bytes, bytes per second, FLOP/s by dtype, and the document
    and year that say so.
    """

    kind: Literal["cpu", "cuda"]
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    source: str
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class LinkSheet:
    """A link, in bytes per second each way.

    ``through_host``: every device of a node has one to the host, which carries no more,
    all messages together, than two devices that fill theirs both ways; otherwise all
    devices can fill theirs at once.
    """

    latency_s: float
    bytes_per_s: float
    source: str
    through_host: bool = False
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class Catalogue:
    """``about``: what the numbers are, and what they are not."""

    about: str
    devices: Mapping[str, DeviceSheet]
    links: Mapping[str, LinkSheet]
    __pydantic_config__ = STRICT


@cache
def catalogue() -> Catalogue:
    text = (
        resources("hetconv.schemas")
        .joinpath("devices.json")
        .read_text(encoding="utf-8")
    )
    return TypeAdapter(Catalogue).validate_python(json.loads(text))


def find_device(name: str) -> tuple[DeviceSheet, float]:
    """The sheet of ``T4``, or of ``T4@0.5``, and the speed that is left of it. Raises
    `ProfileError` otherwise.
    """
    base, at, speed = name.partition("@")
    known = catalogue().devices
    try:
        scale = float(speed) if at else 1.0
    except ValueError:
        scale = 0.0
    if base not in known or not 0 < scale <= 1:
        raise ProfileError(
            f"device {name!r} is not catalogued; choose one of {', '.join(known)} (with @0.5 "
            "for half its speed)"
        )
    return known[base], scale


def find_link(name: str) -> LinkSheet:
    """Raises `ProfileError` for a name that is not catalogued."""
    known = catalogue().links
    if name not in known:
        raise ProfileError(
            f"link {name!r} is not catalogued; choose one of {', '.join(known)}"
        )
    return known[name]


def parse_nodes(devices: str | Sequence[str]) -> Nodes:
    """``A100-SXM4-80GB, 2xT4 / 4xT4`` -> the names in each node, in rank order. A
    sequence is joined by commas.

    Raises `ProfileError` for a node or a name that is empty and for a count of zero;
    names are not looked up.
    """
    text = devices if isinstance(devices, str) else ",".join(devices)
    return tuple(
        tuple(
            name for part in node.split(",") for name in _repeated(part.strip(), text)
        )
        for node in text.split("/")
    )


def _repeated(part: str, text: str) -> list[str]:
    """``2xT4`` -> two names."""
    counted = re.match(r"(\d+)x", part)
    count, name = (int(counted[1]), part[counted.end() :]) if counted else (1, part)
    if not name or count < 1:
        raise ProfileError(
            f"devices {text!r}: {part!r} names no device; write A100-SXM4-80GB,2xT4, with / "
            "between nodes"
        )
    return [name] * count
