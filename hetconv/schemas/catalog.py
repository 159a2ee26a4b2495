"""Data sheets of devices and links, and how a cluster is written by their names.

The sheets are in ``devices.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from itertools import chain
from typing import Literal

from pydantic import TypeAdapter

from hetconv.errors import ProfileError

STRICT = {"extra": "forbid"}
Nodes = tuple[tuple[str, ...], ...]  # names of the devices of each node


@dataclass(frozen=True)
class DeviceSheet:
    """Peak figures of a device.

    Attributes:
        kind: Kind of device, as PyTorch names it.
        memory_bytes: Bytes of memory.
        bytes_per_s: Memory bandwidth.
        flops_per_s: FLOP/s by dtype.
        source: Document and year that state the figures.
    """

    kind: Literal["cpu", "cuda"]
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    source: str
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class LinkSheet:
    """Peak figures of a link.

    Attributes:
        latency_s: Latency of a message.
        bytes_per_s: Bandwidth in each direction.
        source: Document and year that state the figures.
        through_host: Whether all devices of a node share the host's bandwidth, which is
            that of two devices that fill their links both ways. Otherwise all devices can
            fill their links at once.
    """

    latency_s: float
    bytes_per_s: float
    source: str
    through_host: bool = False
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class Catalog:
    """Data sheets by name.

    Attributes:
        about: What the figures are, and what they are not.
        devices: Devices by name.
        links: Links by name.
    """

    about: str
    devices: Mapping[str, DeviceSheet]
    links: Mapping[str, LinkSheet]
    __pydantic_config__ = STRICT


@cache
def load_catalog() -> Catalog:
    """Reads the data sheets."""
    text = (
        resources("hetconv.schemas")
        .joinpath("devices.json")
        .read_text(encoding="utf-8")
    )
    return TypeAdapter(Catalog).validate_python(json.loads(text))


def find_device(name: str) -> tuple[DeviceSheet, float]:
    """Finds a device by name, such as ``T4``, or ``T4@0.5`` for half its speed.

    Args:
        name: Name, with a speed in (0, 1] if it is to be throttled.

    Returns:
        The data sheet, and the fraction of its speed that is left.

    Raises:
        ProfileError: If there is no such device.
    """
    base, at, speed = name.partition("@")
    known = load_catalog().devices
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
    """Finds a link by name.

    Args:
        name: Name of the link.

    Raises:
        ProfileError: If there is no such link.
    """
    known = load_catalog().links
    if name not in known:
        raise ProfileError(
            f"link {name!r} is not catalogued; choose one of {', '.join(known)}"
        )
    return known[name]


def parse_nodes(devices: str | Sequence[str]) -> Nodes:
    """Parses the devices of a cluster, such as ``A100-SXM4-80GB, 2xT4 / 4xT4``.

    Names are not looked up.

    Args:
        devices: Devices, separated by commas, with a slash between nodes; or a sequence of
            such texts.

    Returns:
        Names of the devices of each node, in rank order.

    Raises:
        ProfileError: If a name is empty, or a count is zero.
    """
    text = devices if isinstance(devices, str) else ",".join(devices)
    nodes = []
    for node in text.split("/"):
        names = (_expand_count(part.strip(), text) for part in node.split(","))
        nodes.append(tuple(chain.from_iterable(names)))
    return tuple(nodes)


def _expand_count(part: str, text: str) -> list[str]:
    """Returns two names for ``2xT4``."""
    counted = re.match(r"(\d+)x", part)
    count, name = (int(counted[1]), part[counted.end() :]) if counted else (1, part)
    if not name or count < 1:
        raise ProfileError(
            f"devices {text!r}: {part!r} names no device; write A100-SXM4-80GB,2xT4, with / "
            "between nodes"
        )
    return [name] * count
