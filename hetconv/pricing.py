"""What a plan is predicted to take: its operators in order on the clocks of the devices, and all that moves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .cost import Operators, memory_bytes
from .errors import PlanError
from .graph import Graph
from .layout import traffic
from .network import Array, Network
from .plan import Gathered, Mode, Prediction
from .profile import ClusterProfile
from .rules import Split
from .simulate import Clocks, Listener, run
from .walk import Applied, Transfers, walk


@dataclass(frozen=True)
class LayerCost:
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    sent_bytes: int


class Pricer:
    """Prices many plans of one model on one cluster."""

    def __init__(self, graph: Graph, profile: ClusterProfile, mode: Mode):
        self.graph, self.profile, self.mode = graph, profile, mode
        self.network = Network.of(profile)
        self.operators = Operators(graph, profile.devices)

    def price(
        self, splits: Mapping[str, Split], listener: Listener | None = None
    ) -> tuple[Prediction, dict[str, LayerCost]]:
        """The predicted step under ``splits``, and the cost of every layer that a plan names.

        ``listener`` is told what every device does when. Raises `PlanError` for splits into another number of parts
        than the profile has devices.
        """
        world, train = self.profile.world, self.mode == "train"
        for name, split in splits.items():
            if split.kind != "replicate" and len(split.sizes) != world:
                raise PlanError(f"{name!r} is split into {len(split.sizes)} parts, but the profile has {world} devices")
        applied, sums = walk(self.graph, splits, world, self.mode)
        forward = [self.operators.seconds(a.node, a.split, a.step, False) for a in applied]
        backward = [self.operators.seconds(a.node, a.split, a.step, True) for a in applied] if train else None
        clocks = Clocks(self.network, listener)
        run(clocks, applied, forward, backward, sums)
        sent, layers = self._sent(sums) if train else np.zeros((world, world)), {}
        for k, a in enumerate(applied):
            own = self._sent(a.forward) + (self._sent(a.backward) if train else 0)
            sent = sent + own
            if a.node.layer is not None:
                spent = tuple(backward[k].tolist()) if backward is not None else ()
                layers[a.node.layer] = LayerCost(tuple(forward[k].tolist()), spent, int(own.sum()))
        step_s, summed_s = float(clocks.now.max()), self._summed(applied, forward, backward, sums)
        busy, moving = tuple(clocks.busy.tolist()), tuple(clocks.moving.tolist())
        matrix = tuple(tuple(int(b) for b in row) for row in sent)
        memory = memory_bytes(self.graph, applied, splits, self.mode)
        return Prediction(step_s, step_s - max(busy), busy, matrix, memory, summed_s, moving), layers

    def memory(self, splits: Mapping[str, Split]) -> tuple[int, ...]:
        """Bytes on each device, as `price` predicts them, without the seconds."""
        applied, _ = walk(self.graph, splits, self.profile.world, self.mode)
        return memory_bytes(self.graph, applied, splits, self.mode)

    def _sent(self, transfers: Transfers) -> Array:
        """(P, P): bytes from sender to receiver."""
        world = self.profile.world
        rounds = (self.network.messages(one, itemsize).sent_bytes for rounds, itemsize in transfers for one in rounds)
        return sum(rounds, np.zeros((world, world)))

    def _summed(
        self, applied: list[Applied], forward: list[Array], backward: list[Array] | None, sums: Transfers
    ) -> float:
        """What every operator and movement takes alone, added up; halos are hidden by what is computed meanwhile."""
        total = 0.0
        for k, a in enumerate(applied):
            passes = [(forward[k], a.forward)] + ([(backward[k], a.backward)] if backward is not None else [])
            for seconds, transfers in passes:
                computing, moving = float(seconds.max()), sum(self.network.rounds_s(*t) for t in transfers)
                total += max(computing, moving) if a.hides else computing + moving
        moved = sum(one[0][0][0].numel * itemsize for one, itemsize in sums)
        return total + moved * self.network.s_per_summed_byte


def price(
    graph: Graph, profile: ClusterProfile, splits: Mapping[str, Split], mode: Mode
) -> tuple[Prediction, dict[str, LayerCost]]:
    """`Pricer.price`, of one plan."""
    return Pricer(graph, profile, mode).price(splits)


def gathers(graph: Graph, splits: Mapping[str, Split], world: int, mode: Mode) -> tuple[Gathered, ...]:
    """The operators, but for layers that ``splits`` replicates, that run on the whole; those that send most first."""
    found = []
    for a in walk(graph, splits, world, mode)[0]:
        sent = sum(sum(traffic(rounds, itemsize).values()) for rounds, itemsize in a.forward + a.backward)
        if a.node.layer is None and a.node.outputs and a.step.output.kind == "replicated" and sent:
            function = a.node.function or a.node.name
            found.append(Gathered(a.node.name, function, graph.values[a.node.outputs[0]].shape, sent))
    return tuple(sorted(found, key=lambda g: -g.sent_bytes))
