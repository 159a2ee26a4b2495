"""Plan known architectures on modelled devices: seconds to plan, predicted gain.

Nodes of four devices of 10, 5, 5 and 2 TFLOPS; memory is no bound. The devices of a
node share a wire of 10 GB/s, and so does every node its card to the others, in each
direction. Seconds are of one CPU core.
"""

from __future__ import annotations

import gc
import json
import platform
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import combinations, permutations
from typing import Any, TypeVar

from bench.shared.machine import add_output_argument, commit, save
from bench.shared.models import captured
from bench.shared.verdict import Demand, Row
from hetconv.planner.candidates import Candidates
from hetconv.planner.make_plan import make_plan
from hetconv.planner.table_builder import build_tables
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import DeviceModel, LinkModel, SharedWire
from hetconv.solver.elimination import solve

T = TypeVar("T")
TFLOPS = 10, 5, 5, 2
LATENCY_S, S_PER_BYTE, UNBOUND = 10e-6, 1e-10, 1e15
ROUNDS, TABLES = 3, 3.0  # best of; what tables may take, by what the search may
SAMPLE, EVEN = "uneven sample split", "even split"
GAINS = {
    ("ResNet-50", 4): {SAMPLE: 1.15, EVEN: 1.2},
    ("AlexNet", 4): {SAMPLE: 2.0, EVEN: 1.2},
}


@dataclass(frozen=True)
class Case:
    """``limit_s``: that the search may take."""

    model: str
    devices: int
    batch: int
    limit_s: float | None = None


CASES = (
    Case("AlexNet", 4, 64),
    Case("ResNet-50", 4, 64),
    Case("U-Net", 4, 16),
    Case("DenseNet-121", 4, 64),
    Case("InceptionV3", 8, 64, 0.5),
    Case("ResNet-152", 16, 256, 1.0),
    Case("ResNet-152", 64, 1024, 10.0),
)


def modelled(devices: int) -> ClusterProfile:
    """The profile; the last node may be smaller."""
    speeds = [TFLOPS[rank % len(TFLOPS)] for rank in range(devices)]
    models = tuple(
        DeviceModel(f"{t} TFLOPS", "cuda", UNBOUND, {"float32": t * 1e12}, UNBOUND)
        for t in speeds
    )
    links = {
        f"{a}-{b}": LinkModel(LATENCY_S, S_PER_BYTE)
        for a, b in combinations(range(devices), 2)
    }
    nodes = tuple(
        tuple(range(devices))[i : i + len(TFLOPS)]
        for i in range(0, devices, len(TFLOPS))
    )
    wires = []
    for i, node in enumerate(nodes):
        away = [(a, b) for a in node for b in range(devices) if b not in node]
        wires.append((f"host of node {i}", tuple(permutations(node, 2))))
        wires += [
            (f"card of node {i}, out", tuple(away)),
            (f"card of node {i}, in", tuple((b, a) for a, b in away)),
        ]
    shared = tuple(
        SharedWire(name, pairs, S_PER_BYTE) for name, pairs in wires if pairs
    )
    return ClusterProfile(models, links, estimated=True, shared=shared, nodes=nodes)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--models", help="only these, with commas between")
    add_output_argument(parser)


def run(args: Namespace) -> None:
    """Prints a line per case, what must hold, and the results as one JSON document last."""
    wanted = args.models.split(",") if args.models is not None else None
    rows = []
    for case in CASES:
        if wanted is None or case.model in wanted:
            rows.append(measure(case))
            print(line(rows[-1]), flush=True)
    print("must hold:", *demands(rows), sep="\n  ")
    setup = {
        "machine": platform.machine(),
        "python": platform.python_version(),
    } | commit()
    document = {"suite": "planner", "setup": setup, "cases": rows}
    if args.output is not None:
        save(args.output, document)
    print(json.dumps(document))


def measure(case: Case) -> dict[str, Any]:
    """CPU seconds of each part, how large the problem is, and the predicted seconds of
    a step in every way.
    """
    graph, profile = captured(case.model, case.batch), modelled(case.devices)

    def choices() -> Any:
        ways = Candidates(graph, profile, "train")
        return ways.choices(ways.shared_proportions())

    of_layers, candidates_s = timed(choices)
    known, tables_s = timed(lambda: build_tables(graph, profile, of_layers, "train"))
    found, search_s = timed(lambda: solve(known.unary, known.pairwise))
    plan, plan_s = timed(lambda: make_plan(graph, profile), rounds=1)
    seconds = {
        "candidates": candidates_s,
        "tables": tables_s,
        "search": search_s,
        "make_plan": plan_s,
    }
    size = {
        "nodes": len(known.unary),
        "edges": len(known.pairwise),
        "choices": sum(map(len, known.unary.values())),
    }
    steps = (
        {"plan": plan.predicted.step_s, **plan.alternatives}
        if plan.predicted and plan.alternatives
        else {}
    )
    return (
        asdict(case)
        | {"how": found.method, "chosen": plan.chosen}
        | size
        | {"cpu_s": seconds, "step_s": steps}
    )


def timed(work: Callable[[], T], rounds: int = ROUNDS) -> tuple[T, float]:
    """What it gives, and the CPU seconds of the best of some rounds; what other cases
    left is no garbage to look at.
    """
    took = []
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        start = time.process_time()
        result = work()
        took.append(time.process_time() - start)
    gc.unfreeze()
    return result, round(min(took), 4)


def line(row: Row) -> str:
    spent = ", ".join(f"{part} {s:.3f}" for part, s in row["cpu_s"].items())
    others = {
        n: row["step_s"][n]
        for n in (SAMPLE, "uneven filter split", EVEN, "fastest device alone")
    }
    gains = ", ".join(
        f"{name} {s / row['step_s']['plan']:.2f}x" for name, s in others.items()
    )
    return (
        f"{row['model']} on {row['devices']}: {row['nodes']} nodes, {row['edges']} edges, "
        f"{row['choices']} choices, "
        f"by {row['how']}\n  CPU seconds: {spent}\n  a step of "
        f"{row['step_s']['plan'] * 1e3:.1f} ms; {gains}"
    )


def demands(rows: list[dict[str, Any]]) -> list[Demand]:
    found = []
    for row in rows:
        name, spent, limit = (
            f"{row['model']} on {row['devices']}",
            row["cpu_s"],
            row["limit_s"],
        )
        if limit is not None:
            found.append(
                Demand(
                    f"{name}: {limit:g} s over what the search takes",
                    1.0,
                    limit / spent["search"],
                )
            )
            text = f"{name}: {TABLES * limit:g} s over what its tables take"
            found.append(
                Demand(
                    text, 1.0, TABLES * limit / (spent["candidates"] + spent["tables"])
                )
            )
        for other, gain in GAINS.get((row["model"], row["devices"]), {}).items():
            found.append(
                Demand(
                    f"{name}: {other} over plan",
                    gain,
                    row["step_s"][other] / row["step_s"]["plan"],
                )
            )
    return found
