"""The simulated step of a plan, written for a trace viewer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hetconv.candidates import ALONE
from hetconv.files import write
from hetconv.graph import Graph
from hetconv.plan import Plan
from hetconv.pricing import Pricer
from hetconv.profile import ClusterProfile, LinkModel
from hetconv.simulate import Event
from hetconv.trace import document


def write_trace(path: Path, graph: Graph, profile: ClusterProfile, plan: Plan) -> None:
    """Simulates the plan's step on the cluster and writes when each device computes, sends and receives, and waits.

    A device alone runs as it does without hetconv, and tells no other what it computed.
    """
    if plan.chosen.startswith(ALONE):
        silent = dict.fromkeys(profile.links, LinkModel(0.0, 0.0))
        profile = replace(profile.alone(), links=silent, shared=(), sum_s_per_byte=0.0)
    events: list[Event] = []
    Pricer(graph, profile, plan.mode).price(plan.splits, events.append)
    write(path, (json.dumps(document(plan.devices, events)) + "\n").encode())
