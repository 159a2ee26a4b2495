"""The simulated step of a plan, written for a trace viewer."""

from __future__ import annotations

import json
from pathlib import Path

from hetconv.files import write
from hetconv.graph import Graph
from hetconv.plan import Plan
from hetconv.pricing import Pricer
from hetconv.profile import ClusterProfile
from hetconv.simulate import Event
from hetconv.trace import document


def write_trace(path: Path, graph: Graph, profile: ClusterProfile, plan: Plan) -> None:
    """Simulates the plan's step on the cluster and writes when each device computes, sends and receives, and waits."""
    events: list[Event] = []
    Pricer(graph, profile, plan.mode).of(plan.chosen).price(plan.splits, events.append)
    write(path, (json.dumps(document(plan.devices, events)) + "\n").encode())
