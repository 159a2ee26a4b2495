"""The simulated step of a plan, written for a trace viewer."""

from __future__ import annotations

import json
from pathlib import Path

from hetconv.cost.chrome_trace import document
from hetconv.cost.estimator import Pricer
from hetconv.cost.timeline import Event
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.json_files import write
from hetconv.schemas.plan import Plan
from hetconv.tracing.graph import Graph


def write_trace(path: Path, graph: Graph, profile: ClusterProfile, plan: Plan) -> None:
    """Simulates the plan's step on the cluster and writes when each device computes, sends and receives, and waits."""
    events: list[Event] = []
    Pricer(graph, profile, plan.mode).of(plan.chosen).price(plan.splits, events.append)
    write(path, (json.dumps(document(plan.devices, events)) + "\n").encode())
