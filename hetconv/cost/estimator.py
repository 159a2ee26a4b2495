"""Predicted step of a plan: its operators in order on the devices, and all messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from hetconv.errors import PlanError
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE, GatheredOp, Mode, Prediction
from hetconv.sharding.moves import bytes_per_pair
from hetconv.sharding.split import Split
from hetconv.tracing.graph import Graph

from .memory import (
    MemoryUse,
    output_bytes,
    parameter_bytes,
    peak_transient_bytes,
    receive_buffer_bytes,
    result_bytes,
    workspace_bytes,
)
from .memory_timeline import held_copies, memory_bytes
from .network import Array, Messages, Network, overlapped_s
from .operator_cost import Operators
from .propagate import Propagator, Schedule, ScheduledOp, Transfers, propagate
from .timeline import Clocks, Listener, Pass


@dataclass(frozen=True)
class LayerCost:
    """Predicted cost of a layer.

    Attributes:
        forward_s: seconds by device.
        backward_s: likewise; empty in inference.
        sent_bytes: that all ranks send together.
        memory_bytes: of its parameters, its result and what it receives, by device.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    sent_bytes: int
    memory_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class _Known:
    """What an operator under a plan takes: forward and, in training, backward.

    ``layer_s``: of each pass, without sums of gradients; ``messages``: of each pass, in
    all rounds. What steps alone do not need is found when it is asked for.
    """

    applied: ScheduledOp
    passes: tuple[Pass, ...]
    layer_s: tuple[Array, ...]
    messages: tuple[tuple[Messages, ...], ...]
    network: Network
    graph: Graph
    on_cpu: Array  # (P,): 1 for CPUs, 0 for others

    @cached_property
    def layer_cost(self) -> LayerCost:
        forward, *backward = (tuple(seconds.tolist()) for seconds in self.layer_s)
        sent_bytes = sum(m.sent_bytes.sum() for m in chain(*self.messages))
        a, use = self.applied, self.footprint
        splits = {a.node.layer: a.split} if a.node.layer is not None else {}
        parameters = parameter_bytes(
            self.graph, splits, self.network.world, a.node.layer
        )
        held = held_copies("train" if backward else "infer") * np.array(parameters)
        memory = (held + use.result + use.receive_buffers).astype(int).tolist()
        return LayerCost(
            forward, backward[0] if backward else (), int(sent_bytes), tuple(memory)
        )

    @cached_property
    def summed_s(self) -> tuple[float, ...]:
        """Seconds of each pass alone, as `Prediction` has them."""
        a, network = self.applied, self.network
        found = []
        for one in self.passes:
            moving = (
                sum(
                    network.rounds_s(*t, separate=a.overlaps_halos)
                    for t in a.waits_for(one.backward)
                )
                if not a.is_stats_exchange
                else 0.0
            )
            found.append(
                overlapped_s(
                    float(one.seconds.max()),
                    moving,
                    network.overlap if a.overlaps_halos else 0.0,
                )
            )
        return tuple(found)

    @cached_property
    def footprint(self) -> MemoryUse:
        a, world = self.applied, self.network.world
        copies = passing = np.zeros(world)
        for backward, messages in zip((False, True), self.messages, strict=False):
            own = a.of_inputs(backward)  # statistics stay with nobody
            made = receive_buffer_bytes(own, messages, world, separate=a.overlaps_halos)
            copies = copies if backward else made
            passing = np.maximum(
                passing,
                peak_transient_bytes(messages, world) + (made if backward else 0.0),
            )
        result, output = (
            np.array(of(self.graph, a.node, a.sharding), dtype=np.float64)
            for of in (result_bytes, output_bytes)
        )
        if a.node.outputs:
            itemsize = self.graph.values[a.node.outputs[0]].itemsize
            workspace = workspace_bytes(a.node.op, a.split, a.sharding, itemsize)
            passing = passing + workspace * self.on_cpu
        return MemoryUse(result, output, copies, passing, not a.overlaps_halos)


class StepEstimator:
    """Predicts steps of many plans of one model on one cluster.

    What an operator takes is kept from plan to plan.
    """

    def __init__(self, graph: Graph, profile: ClusterProfile, mode: Mode):
        self.graph, self.profile, self.mode = graph, profile, mode
        self.network = Network.of(profile)
        self.operators = Operators(graph, profile.devices)
        self.walk = Propagator(graph, profile.world, mode)
        self._known: dict[int, _Known] = {}
        self._computing: dict[tuple[int, bool], tuple[Array, Array]] = {}
        kinds = [device.kind for device in profile.devices]
        self._on_cpu = np.array([float(kind == "cpu") for kind in kinds])
        self._lone: StepEstimator | None = None

    def estimate(
        self, splits: Mapping[str, Split], listener: Listener | None = None
    ) -> tuple[Prediction, dict[str, LayerCost]]:
        """The predicted step under ``splits``, and the cost of every layer that a plan names.

        ``listener`` is told what every device does when. Raises `PlanError` for splits
        into another number of parts than the profile has devices.
        """
        world = self.profile.world
        for name, split in splits.items():
            if split.kind != "replicate" and len(split.sizes) != world:
                raise PlanError(
                    f"{name!r} is split into {len(split.sizes)} parts, but the profile has "
                    f"{world} devices"
                )
        applied, sums = self.walk(splits)
        known = [self._of(a) for a in applied]
        rounds = self._rounds(sums)
        passes = [*_in_order(known), *self._summing(sums, rounds)]
        clocks = _walked(passes, Clocks(world, listener, self.network.overlap))
        layers = {
            k.applied.node.layer: k.layer_cost
            for k in known
            if k.applied.node.layer is not None
        }
        step_s, summed_s = float(clocks.now.max()), self._summed(known, sums)
        busy, moving = tuple(clocks.busy.tolist()), tuple(clocks.moving.tolist())
        messages = chain(rounds, *chain(*(k.messages for k in known)))
        matrix = (
            sum((m.sent_bytes for m in messages), np.zeros((world, world)))
            .astype(int)
            .tolist()
        )
        memory = self._memory(splits, known, sums)
        return Prediction(
            step_s,
            step_s - max(busy),
            busy,
            tuple(map(tuple, matrix)),
            memory,
            summed_s,
            moving,
        ), layers

    def of(self, name: str) -> StepEstimator:
        """Who prices a plan of this name: a device alone sends nothing to the others."""
        if not name.startswith(SINGLE_DEVICE):
            return self
        if self._lone is None:
            self._lone = StepEstimator(
                self.graph, self.profile.without_messages(), self.mode
            )
        return self._lone

    def over(self, profile: ClusterProfile) -> StepEstimator:
        """Returns an estimator for the same devices with the links of another profile."""
        other = copy(self)
        other.profile, other.network, other._known, other._lone = (
            profile,
            Network.of(profile),
            {},
            None,
        )
        return other

    def step_s(self, name: str, splits: Mapping[str, Split]) -> float:
        """Seconds of a step of the plan of this name, see `of`."""
        pricer = self.of(name)
        return pricer.walked_s(pricer.walk(splits))

    def walked_s(self, walked: Schedule) -> float:
        """Returns the seconds of a step of a schedule that this estimator made."""
        applied, sums = walked
        computing = _in_order([self._of(a) for a in applied])
        passes = [*computing, *self._summing(sums, self._rounds(sums))]
        clocks = Clocks(self.profile.world, overlap=self.network.overlap)
        return float(_walked(passes, clocks).now.max())

    def _summing(self, sums: Transfers, rounds: Sequence[Messages]) -> list[Pass]:
        """Of gradients, at the end of a step in training."""
        training = self.mode == "train"
        return (
            [Pass("sums of gradients", True, self.network.summing(sums), rounds)]
            if training
            else []
        )

    def _rounds(self, sums: Transfers) -> list[Messages]:
        return [
            self.network.messages(one, itemsize)
            for rounds, itemsize in sums
            for one in rounds
        ]

    def memory(self, splits: Mapping[str, Split]) -> tuple[int, ...]:
        """Bytes on each device, as `estimate` predicts them, without the seconds."""
        applied, sums = self.walk(splits)
        return self._memory(splits, [self._of(a) for a in applied], sums)

    def _memory(
        self, splits: Mapping[str, Split], known: Sequence[_Known], sums: Transfers
    ) -> tuple[int, ...]:
        world = self.profile.world
        passing = np.zeros(world)
        for rounds, itemsize in sums:  # one bucket after the other
            messages = [self.network.messages(one, itemsize) for one in rounds]
            bucket = receive_buffer_bytes(
                ((rounds, itemsize),), messages, world, separate=False
            )
            passing = np.maximum(
                passing, bucket + peak_transient_bytes(messages, world)
            )
        uses = [k.footprint for k in known]
        return memory_bytes(self.graph, uses, splits, world, self.mode, passing)

    def _of(self, applied: ScheduledOp) -> _Known:
        """By identity: `Propagator` gives the same object again."""
        if id(applied) not in self._known:
            self._known[id(applied)] = self._priced(applied)
        return self._known[id(applied)]

    def _priced(self, a: ScheduledOp) -> _Known:
        passes, own, sent = [], [], []
        for backward in (False, True)[: 1 + (self.mode == "train")]:
            messages = tuple(
                self.network.messages(one, itemsize, a.overlaps_halos)
                for rounds, itemsize in a.transfers(backward)
                for one in rounds
            )
            layer_s, seconds = self._computed(a, backward)
            own.append(layer_s)
            own_rounds = sum(len(rounds) for rounds, _ in a.waits_for(backward))
            waited = tuple(m for m in messages[:own_rounds] if m.pairs.any())
            passes.append(
                Pass(a.node.name, backward, seconds, waited, a.overlaps_halos)
            )
            sent.append(messages)
        return _Known(
            a,
            tuple(passes),
            tuple(own),
            tuple(sent),
            self.network,
            self.graph,
            self._on_cpu,
        )

    def _computed(self, a: ScheduledOp, backward: bool) -> tuple[Array, Array]:
        """Of the operator, and with the gradients that are added up for it."""
        key = id(a), backward
        if key not in self._computing:
            layer_s = self.operators.seconds(a.node, a.split, a.sharding, backward)
            self._computing[key] = (
                layer_s,
                layer_s + self.operators.forks(a.node, (a.sharding,), backward)[0],
            )
        return self._computing[key]

    def _summed(self, known: Sequence[_Known], sums: Transfers) -> float:
        """Returns the sum of all operators and messages; computation hides halos."""
        total = sum(chain(*(k.summed_s for k in known)), 0.0)
        for rounds, itemsize in sums:
            (held, _), *_ = rounds
            holders = tuple(rank for rank, box in enumerate(held) if box.numel)
            total += (
                held[holders[0]].numel
                * itemsize
                * self.network.s_per_summed_byte(holders)
            )
        return total


def _walked(passes: Sequence[Pass], clocks: Clocks) -> Clocks:
    """After all passes."""
    for one in passes:
        clocks.step(one)
    return clocks


def _in_order(known: Sequence[_Known]) -> Iterator[Pass]:
    """Forward, and backward from the end."""
    return chain((k.passes[0] for k in known), *(k.passes[1:] for k in reversed(known)))


def estimate(
    graph: Graph, profile: ClusterProfile, splits: Mapping[str, Split], mode: Mode
) -> tuple[Prediction, dict[str, LayerCost]]:
    """`StepEstimator.estimate`, of one plan."""
    return StepEstimator(graph, profile, mode).estimate(splits)


def gathers(
    graph: Graph, splits: Mapping[str, Split], world: int, mode: Mode
) -> tuple[GatheredOp, ...]:
    """Returns the operators that run on gathered tensors; those that send most first.

    Layers that are replicated do not count.

    Args:
        graph: of the model.
        splits: by layer.
        world: number of ranks.
        mode: whether steps train.
    """
    found = []
    for a in propagate(graph, splits, world, mode)[0]:
        if (
            a.node.layer is None
            and a.node.outputs
            and a.sharding.output.kind == "replicated"
        ):
            sent = sum(
                sum(bytes_per_pair(rounds, itemsize).values())
                for rounds, itemsize in a.forward + a.backward
            )
            known = (
                a.node.name,
                a.node.function or a.node.name,
                graph.values[a.node.outputs[0]].shape,
            )
            found += [GatheredOp(*known, sent)] if sent else []
    return tuple(sorted(found, key=lambda g: -g.sent_bytes))
