"""ClusterProfile: measured or estimated devices and links of a cluster; one JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, permutations
from pathlib import Path

from hetconv.errors import ProfileError
from hetconv.sharding.conv_spec import ConvSpec, MemoryFormat

from . import json_files
from .catalog import find_device, find_link, parse_nodes
from .device_model import (
    Axis,
    Copying,
    Curve,
    DeviceModel,
    LinkModel,
    OperatorModel,
    SharedWire,
)
from .json_files import STRICT, AtLeastZero, Fraction, Positive
from .provenance import Disturbance
from .tuning_results import TunedChunks, TunedPlan, TunedRatio, TunedTile

__all__ = [
    "Axis",
    "ClusterProfile",
    "Copying",
    "Curve",
    "DeviceModel",
    "LinkModel",
    "OperatorModel",
    "SharedWire",
    "between_nodes",
    "nodes_of",
]

VERSION = 1
ACHIEVED = 0.5  # of a data sheet's peak, in a convolution; an estimate until something is measured
CALL_S = 5e-6  # that an operator takes however little it computes; an estimate too


@dataclass(frozen=True)
class ClusterProfile:
    """Devices and links of a cluster, and what was tuned on them.

    Attributes:
        devices: Devices in rank order.
        links: Links by their two ranks, as in "0-1", the lower one first.
        tuned: Tuned ratios of whole models.
        fingerprint: Names of the links that were taken from the catalogue.
        estimated: Whether nothing was measured: devices come from data sheets.
        tiles: Tiles of the kernels on its GPUs, for the shares that the tuned ratio
            gives them.
        chunks: In how many chunks a filter split is gathered while it is computed,
            where that was measured.
        shared: Wires that several pairs use, beside the link of each pair.
        nodes: Ranks in each host; all in one by default.
        overlap: While halos travel and the device computes, which part of the shorter
            one takes no time of its own.
        sum_s_per_byte: Seconds that each rank takes, beside messages and adding, for a
            byte of sums of gradients that it holds.
        plans: Plans of whole models whose steps were measured.
        latency_at_work: How many times the latency of links, between devices that rest,
            a message has in whole steps.
        bytes_at_work: How many times as long the bytes of messages travel there.
        disturbed: What was measured while something else used the devices.
    """

    devices: tuple[DeviceModel, ...]
    links: Mapping[str, LinkModel]
    tuned: tuple[TunedRatio, ...] = ()
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    estimated: bool = False
    tiles: tuple[TunedTile, ...] = ()
    chunks: tuple[TunedChunks, ...] = ()
    shared: tuple[SharedWire, ...] = ()
    nodes: tuple[tuple[int, ...], ...] = ()
    overlap: Fraction = 1.0
    sum_s_per_byte: AtLeastZero = 0.0
    plans: tuple[TunedPlan, ...] = ()
    latency_at_work: Positive = 1.0
    bytes_at_work: Positive = 1.0
    disturbed: tuple[Disturbance, ...] = ()
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        ranks = range(self.world)
        wanted = {f"{a}-{b}" for a, b in combinations(ranks, 2)}
        if not self.devices or self.links.keys() != wanted:
            raise ProfileError(
                f"a profile of {self.world} devices needs links {sorted(wanted)}, but has "
                f"{sorted(self.links)}"
            )
        if not self.nodes:
            object.__setattr__(self, "nodes", (tuple(ranks),))
        if sorted(chain(*self.nodes)) != [*ranks] or not all(self.nodes):
            raise ProfileError(
                f"nodes {self.nodes} do not have each of {self.world} ranks once; put each "
                "into one node"
            )
        pairs = set(permutations(ranks, 2))
        for wire in self.shared:
            if not pairs.issuperset(wire.pairs):
                raise ProfileError(
                    f"wire {wire.name!r} is shared by {wire.pairs}, not all of them pairs of "
                    "two ranks"
                )

    @property
    def world(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the devices."""
        return tuple(d.name for d in self.devices)

    @property
    def memory_format(self) -> MemoryFormat:
        """Memory format of images and filters in which the devices were measured."""
        known = (d.measured.memory_format for d in self.devices if d.measured)
        return next(known, "channels_last")

    def link(self, a: int, b: int) -> LinkModel:
        """From a to b."""
        return self.links[f"{a}-{b}"] if a < b else self.links[f"{b}-{a}"].turned()

    def without_messages(self) -> ClusterProfile:
        """The same devices, of which one computes all and tells the others nothing."""
        devices = tuple(replace(device, copying=None) for device in self.devices)
        silent = dict.fromkeys(self.links, LinkModel(0.0, 0.0))
        return replace(
            self, devices=devices, links=silent, shared=(), sum_s_per_byte=0.0
        )

    def slowed(self, factors: Sequence[float]) -> ClusterProfile:
        """Returns the same cluster while its devices take longer.

        Whole steps that were measured at the speed of before say nothing of it, so tuned
        ratios, plans and chunks are left out.

        Args:
            factors: How many times as long each device takes, in rank order.

        Raises:
            ProfileError: There is not one positive, finite factor for each device.
        """
        if len(factors) != self.world:
            raise ProfileError(
                f"{len(factors)} factors were given for {self.world} devices; give one for "
                "each, and 1 for a device at its speed"
            )
        if all(factor == 1 for factor in factors):
            return self
        devices = (
            device.slowed(factor)
            for device, factor in zip(self.devices, factors, strict=True)
        )
        return replace(self, devices=tuple(devices), tuned=(), plans=(), chunks=())

    def subset(self, ranks: Sequence[int]) -> ClusterProfile:
        """Returns a cluster of some of the devices, with its ranks numbered anew.

        Tuned ratios, plans and chunks are of all devices together, and are left out
        unless the ranks are all of them in order.

        Args:
            ranks: Ranks of the devices that remain. The first becomes rank 0.

        Raises:
            ProfileError: A rank is not one of the profile's, or is named twice, or none
                is given.
        """
        known = range(self.world)
        if not ranks or len(set(ranks)) < len(ranks) or set(ranks) - {*known}:
            raise ProfileError(
                f"a subset of ranks {list(ranks)} was asked for; give some of the ranks 0 to "
                f"{self.world - 1}, each once"
            )
        if [*ranks] == [*known]:
            return self
        number = {old: new for new, old in enumerate(ranks)}
        nodes = (tuple(number[r] for r in node if r in number) for node in self.nodes)
        return replace(
            self,
            devices=tuple(self.devices[rank] for rank in ranks),
            links={
                f"{number[a]}-{number[b]}": self.link(a, b)
                for a, b in combinations(ranks, 2)
            },
            shared=tuple(wire for w in self.shared if (wire := w.among(number)).pairs),
            nodes=tuple(node for node in nodes if node),
            tuned=(),
            plans=(),
            chunks=(),
        )

    def chunks_of(self, spec: ConvSpec, sizes: Sequence[int]) -> int:
        """Returns in how many chunks the batch of a filter split is gathered.

        It is one unless more were measured to be faster.

        Args:
            spec: the convolution.
            sizes: filters of each rank.
        """
        return next(
            (
                c.chunks
                for c in self.chunks
                if (c.spec, c.sizes) == (spec, tuple(sizes))
            ),
            1,
        )

    def save(self, path: str | Path) -> None:
        """Writes the profile, atomically."""
        json_files.save(path, "profile", VERSION, self)

    @staticmethod
    def load(path: str | Path) -> ClusterProfile:
        """Reads a profile.

        Raises:
            ProfileError: the file is not a profile of this version; it names the key.
        """
        return json_files.load(path, "profile", VERSION, ClusterProfile, ProfileError)

    @staticmethod
    def schema() -> json_files.Document:
        """The JSON schema of a profile file."""
        return json_files.schema("profile", VERSION, ClusterProfile)

    @staticmethod
    def from_devices(
        devices: str | Sequence[str],
        *,
        link: str = "pcie4-x16",
        between: str | None = None,
    ) -> ClusterProfile:
        """Makes a profile from data sheets, without hardware. It is marked as estimated.

        Every node has one network card, which carries in each direction what ``between``
        carries. PCIe goes through the host: all devices of a node together send what two of them
        send each other at once. With ``-switch`` in the link's name, all use their links at
        once.

        Args:
            devices: names from ``devices.json`` in rank order, such as ``["A100-SXM4-80GB",
                "2xT4", "cpu@0.5"]``, or one string with commas between devices and slashes
                between nodes: ``"4xV100-SXM2-32GB / 4xT4"``.
            link: connects the devices of a node; one for each node where they differ:
                ``"nvlink2 / pcie3-x16"``.
            between: connects the nodes.

        Raises:
            ProfileError: a name is not known, or several nodes have nothing between them.
        """
        names = parse_nodes(devices)
        ranks = iter(range(sum(map(len, names))))
        nodes = tuple(tuple(next(ranks) for _ in node) for node in names)
        models = tuple(_device(name) for node in names for name in node)
        (inside, hosts), (outside, cards) = (
            _within(nodes, link),
            between_nodes(nodes, between),
        )
        said = {"link": link} | ({"between": between} if between is not None else {})
        return ClusterProfile(
            models,
            inside | outside,
            (),
            said,
            estimated=True,
            shared=hosts + cards,
            nodes=nodes,
        )


def nodes_of(devices: Sequence[DeviceModel]) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each host.

    Devices without an identity count as those of one host without a name.
    """
    hosts = [device.identity.host if device.identity else "" for device in devices]
    return tuple(
        tuple(rank for rank, at in enumerate(hosts) if at == host)
        for host in dict.fromkeys(hosts)
    )


def _device(name: str) -> DeviceModel:
    sheet, speed = find_device(name)
    flops = {
        dtype: rate * ACHIEVED * speed for dtype, rate in sheet.flops_per_s.items()
    }
    return DeviceModel(
        name,
        sheet.kind,
        sheet.memory_bytes,
        flops,
        sheet.bytes_per_s * speed,
        CALL_S,
        emulated=speed < 1,
    )


Wiring = tuple[dict[str, LinkModel], tuple[SharedWire, ...]]


def _within(nodes: Sequence[Sequence[int]], link: str) -> Wiring:
    """The links inside of nodes, and the hosts that they go through."""
    names = [name.strip() for name in link.split("/")]
    if len(names) not in (1, len(nodes)):
        raise ProfileError(
            f"link {link!r} names {len(names)} links for {len(nodes)} nodes; give one, or one "
            "for each"
        )
    links: dict[str, LinkModel] = {}
    shared: list[SharedWire] = []
    for i, (node, name) in enumerate(
        zip(nodes, names * (len(nodes) // len(names)), strict=True)
    ):
        sheet = find_link(name)
        links |= {
            f"{a}-{b}": LinkModel(sheet.latency_s, 1 / sheet.bytes_per_s)
            for a, b in combinations(node, 2)
        }
        if sheet.through_host and len(node) > 2:  # two devices do not fill it
            shared.append(
                SharedWire(
                    f"host of node {i}",
                    tuple(permutations(node, 2)),
                    1 / (2 * sheet.bytes_per_s),
                )
            )
    return links, tuple(shared)


def between_nodes(
    nodes: Sequence[Sequence[int]], between: str | None, names: Sequence[str] = ()
) -> Wiring:
    """Returns the links between nodes, and the network card of each node, out and in.

    Args:
        nodes: ranks of each node.
        between: name of the link.
        names: of the nodes; their numbers if empty.
    """
    if len(nodes) == 1 and between is None:
        return {}, ()
    if between is None:
        raise ProfileError(
            f"{len(nodes)} nodes were named, but nothing between them; give it, as in ethernet-100g"
        )
    if len(nodes) == 1:
        raise ProfileError(
            f"between is {between!r}, but all devices are in one node; put / between those of two"
        )
    sheet = find_link(between)
    s_per_byte = 1 / sheet.bytes_per_s
    links: dict[str, LinkModel] = {}
    shared: list[SharedWire] = []
    for i, node in enumerate(nodes):
        name = names[i] if names else f"node {i}"
        others = [rank for other in nodes if other != node for rank in other]
        links |= {
            f"{a}-{b}": LinkModel(sheet.latency_s, s_per_byte)
            for a in node
            for b in others
            if a < b
        }
        shared.append(
            SharedWire(
                f"card of {name}, out",
                tuple((a, b) for a in node for b in others),
                s_per_byte,
            )
        )
        shared.append(
            SharedWire(
                f"card of {name}, in",
                tuple((b, a) for a in node for b in others),
                s_per_byte,
            )
        )
    return links, tuple(shared)
