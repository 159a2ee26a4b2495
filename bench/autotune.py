"""Autotune pairs of this machine: errors of prediction, gain of the plan.

For each case the profile is made as ``hetconv autotune`` makes it; then about twenty
plans, predicted from it, run in turn within each round, with the plain model on each
device alone among them, until two halves of the rounds order them alike, or for so
long. Then the tuned plan, those that were the fastest, the fastest device alone and
even split run once more, and from these rounds the gains are told: by noise alone the
fastest of many seems faster than it is.
Beside them stands what devices of such speeds could gain if nothing were sent, and how
long the plan's own step takes without its messages, in turn with it.
"""

from __future__ import annotations

import json
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.overlap import within
from bench.shared.machine import (
    add_output_argument,
    beside_a_busy_process,
    commit,
    now,
    save,
    software,
)
from bench.shared.plan_gains import OF_SILENT, SILENT, doubt, gains, last, possible
from bench.shared.plan_sample import compared
from bench.shared.prediction_errors import (
    Check,
    layer_errors,
    plan_steps,
    predicted_and_measured,
)
from bench.shared.verdict import Demand
from hetconv.autotune.launch.launcher import parse_devices, run_on
from hetconv.autotune.measure.paired_rounds import Round, Step, paired_rounds
from hetconv.autotune.models.build import build_model, formatted, random_input
from hetconv.autotune.models.inputs import InputSpec, ModelInputs, TensorSpec
from hetconv.autotune.search.job import Job
from hetconv.autotune.search.tune import tune
from hetconv.comm.rank_group import no_payload, rank_group_of
from hetconv.cost.estimator import StepEstimator
from hetconv.planner.make_plan import PLANNED, make_plan
from hetconv.runtime.throttle import DeviceName
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE, Mode, Plan
from hetconv.tracing.graph import Graph
from hetconv.tracing.tracer import capture

MODES: tuple[Mode, ...] = ("infer", "train")
BUSY = "busy"  # behind a pair: the last rank shares its core with a busy process
PAIRS = ("cpu,cpu@0.5", "cpu,cpu@0.25", "cpu,cpu@0.5,cpu@0.5", f"cpu,cpu {BUSY}")
ROUNDS, MAX_ROUNDS = 7, 101  # of all plans
MIN_TOTAL_S, MAX_TOTAL_S = 60.0, 200.0  # that these take together
# Kendall's tau of two halves of the rounds: with less, noise orders plans.
MIN_AGREEMENT = 0.95
FINAL_ROUNDS, FINAL_S = 11, 45.0  # more rounds of the fastest
# standard error of what the plan loses against the fastest of these, or twice as many
# seconds
MAX_DOUBT = 0.01
LAYERS, REPEATED = "median error of layers", "of layers measured again"
# how many times as long a step takes as its busiest device is predicted to compute
OF_COMPUTING = "of computing"


@dataclass(frozen=True)
class Case:
    """A model by its name for ``hetconv autotune``, and the input's shape."""

    name: str
    model: str
    arguments: str
    input: tuple[int, ...]


CASES = (
    Case(
        "super-resolution",
        "bench.shared.models:stack",
        '{"blocks": 4, "channels": 48}',
        (1, 3, 256, 256),
    ),
    Case("U-Net", "bench.shared.models:unet", '{"width": 16}', (1, 3, 192, 192)),
    Case("U-Net 512", "bench.shared.models:unet", '{"width": 16}', (1, 3, 512, 512)),
    Case(
        "ResNet-18",
        "bench.shared.models:torchvision_model",
        '{"name": "resnet18"}',
        (1, 3, 224, 224),
    ),
    Case(
        "ResNet-18 512",
        "bench.shared.models:torchvision_model",
        '{"name": "resnet18"}',
        (1, 3, 512, 512),
    ),
)
"""The last two networks also at images of 512 by 512: what moves and what Python takes
is then a smaller part.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--pairs",
        default=";".join(PAIRS),
        help="with semicolons between (default: %(default)s)",
    )
    parser.add_argument(
        "--models",
        type=_some(c.name for c in CASES),
        help="only these, with commas between",
    )
    parser.add_argument("--modes", type=_some(MODES), help="only this one")
    parser.add_argument(
        "--budget",
        type=float,
        default=150,
        help="seconds of tuning, for each case (default: %(default)s)",
    )
    add_output_argument(
        parser,
        "also write the results here, in the place of older ones of the same cases",
    )


def _some(known: Iterable[str]) -> Callable[[str], list[str]]:
    names = list(known)

    def parse(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(names):
            raise ArgumentTypeError(
                f"{', '.join(sorted(unknown))} is not known; there are {', '.join(names)}"
            )
        return text.split(",")

    return parse


def run(args: Namespace) -> None:
    """Prints a line per case, what must hold, and the results as one JSON document last."""
    rows: list[dict[str, Any]] = []
    asked = [c for c in CASES if args.models is None or c.name in args.models]
    pairs = {
        pair: parse_devices(pair.removesuffix(BUSY).strip())
        for pair in args.pairs.split(";")
    }
    for (pair, devices), case, mode in product(
        pairs.items(), asked, args.modes or MODES
    ):
        found = run_on(
            devices,
            measure,
            tuple(devices),
            case,
            mode,
            args.budget,
            pair.endswith(BUSY),
        )
        head = {
            "pair": pair,
            "model": case.name,
            "mode": mode,
            "date": now(),
            "setup": software() | commit(),
        }
        rows.append(head | found)
        print(line(rows[-1]), flush=True)
        if args.output is not None:  # after each: a run of all takes an hour
            save(
                args.output,
                {"suite": "autotune", "cases": with_others(args.output, rows)},
            )
    print("must hold:", *demands(rows), sep="\n  ")
    print(json.dumps({"suite": "autotune", "cases": rows}))


def with_others(output: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``rows``, and the cases of an older result file that were not measured anew."""
    older = (
        json.loads(output.read_text(encoding="utf-8"))["cases"]
        if output.exists()
        else []
    )
    cases = {
        (case["pair"], case["model"], case["mode"]): case for case in (*older, *rows)
    }
    return list(cases.values())


def line(row: Mapping[str, Any]) -> str:
    def most(gain: str) -> str:
        return f" of {row[gain]:.2f}" if gain in row else ""

    alone, even = (
        f"{row[gain]:.2f}" + most(f"possible {gain}")
        for gain in ("vs_alone", "vs_even")
    )
    split = (
        f", {row[OF_SILENT]:.2f}x its step without messages" if OF_SILENT in row else ""
    )
    return (
        f"{row['pair']:20} {row['model']:16} {row['mode']:5} {row['chosen']}: {alone}x alone, "
        f"{even}x even, {row[OF_COMPUTING]:.2f}x what it computes"
        f"{split}, regret {row['regret']:.1%}; predicted steps "
        f"off by {row['median error']:.1%}, nine of ten by {row['p90 error']:.1%}, layers by "
        f"{row[LAYERS]:.1%}; "
        f"tau {row['tau']:.2f}, of two halves of the rounds {row['tau of rounds']:.2f}; "
        f"the same measured again: steps by {row['spread of rounds']:.1%}, layers by "
        f"{row[REPEATED]:.1%}"
    )


def measure(
    devices: tuple[DeviceName, ...], case: Case, mode: Mode, budget: float, busy: bool
) -> dict[str, Any]:
    """On every rank: the figures of a case."""
    with (
        beside_a_busy_process(busy and rank_group_of().rank == len(devices) - 1),
        tempfile.TemporaryDirectory() as folder,
    ):
        output = Path(folder, "cluster.json")
        inputs = InputSpec((TensorSpec(case.input),))
        job = Job(
            devices,
            case.model,
            case.arguments,
            inputs,
            mode,
            trials=12,
            budget=budget,
            output=output,
            seed=0,
        )
        profile = tune(job).profile
        model = build_model(case.model, case.arguments, 0).train(mode == "train")
        model, x = formatted(model, random_input(case.input, 0), profile.memory_format)
        with torch.set_grad_enabled(mode == "train"):
            graph = capture(model, x)
        plan = make_plan(graph, profile, mode=mode)
        plans = (
            {}
            if plan.chosen.startswith(SINGLE_DEVICE)
            else {PLANNED: dict(plan.splits)}
        )
        all_plans = compared(graph, profile, mode, plans)
        steps = plan_steps(model, ModelInputs.of(x), graph, profile, mode, all_plans)
        check = checked(
            steps,
            x.device,
            lambda ran: predicted_and_measured(ran, graph, profile, mode, all_plans),
        )
        own = plan.chosen if plan.chosen.startswith(SINGLE_DEVICE) else PLANNED
        best = {
            name: steps[name]
            for name in last({n: s for n, (_, s) in check.steps.items()}, own)
        }
        if own == PLANNED:
            best[SILENT] = within(no_payload, steps[PLANNED])
            all_plans[SILENT] = all_plans[PLANNED]
        again = paired_rounds(best, FINAL_ROUNDS, x.device, FINAL_S, MAX_ROUNDS)
        if doubt(again, own) > MAX_DOUBT:  # alike on all ranks
            again += paired_rounds(best, FINAL_ROUNDS, x.device, FINAL_S, MAX_ROUNDS)
        layers = layer_errors(graph, profile, mode, x.device)
    found = {"chosen": plan.chosen} | figures(check) | gains(again, own)
    found |= {
        name: round(median(e), 4)
        for name, e in zip((LAYERS, REPEATED), layers, strict=True)
    }
    found |= {
        OF_COMPUTING: round(
            found["measured again ms"][own] / 1e3 / computing_s(graph, profile, plan), 4
        )
    }
    return found if busy else found | possible([d.speed for d in devices])


def computing_s(graph: Graph, profile: ClusterProfile, plan: Plan) -> float:
    """Of the plan's busiest device."""
    return max(
        StepEstimator(graph, profile, plan.mode)
        .of(plan.chosen)
        .estimate(plan.splits)[0]
        .compute_s
    )


def checked(
    steps: Mapping[str, Step],
    device: torch.device,
    check: Callable[[list[Round]], Check],
) -> Check:
    """Collective: of rounds of all plans, until two halves of them say the same, or
    they have taken long enough.
    """
    ran = paired_rounds(steps, ROUNDS, device, MIN_TOTAL_S, MAX_ROUNDS)
    while True:
        found, took = (
            check(ran),
            sum(sum(one.values()) for one in ran),
        )
        if (
            found.figures["tau of rounds"] >= MIN_AGREEMENT
            or took >= MAX_TOTAL_S
            or len(ran) >= MAX_ROUNDS
        ):
            return found  # alike on all ranks
        ran += paired_rounds(steps, ROUNDS, device)


def figures(check: Check) -> dict[str, Any]:
    """Of predictions; a device alone is measured as the plain model."""
    steps = {n: [round(s * 1e3, 3) for s in both] for n, both in check.steps.items()}
    return {n: round(v, 4) for n, v in check.figures.items()} | {
        "predicted and measured ms": steps
    }


def demands(rows: list[dict[str, Any]]) -> list[Demand]:
    def worst(figure: str, where: Mapping[str, str] | None = None) -> float | None:
        found = [
            r[figure] for r in rows if all(r[k] == v for k, v in (where or {}).items())
        ]
        return min(found) if found else None

    def usual(figure: str) -> float:
        return max(1e-9, median(float(r[figure]) for r in rows))

    def most(figure: str) -> float:
        return max(1e-9, *(float(r[figure]) for r in rows))

    of_pair = {"pair": PAIRS[0], "model": CASES[0].name}
    split = [
        r
        for r in rows
        if r["pair"] in PAIRS[:2] and not r["chosen"].startswith(SINGLE_DEVICE)
    ]
    of_bound = [r[OF_SILENT] for r in split]
    return [
        Demand("10 % over the median error of layers", 1.0, 0.1 / usual(LAYERS)),
        Demand(
            "10 % over the median error of predicted steps",
            1.0,
            0.1 / usual("median error"),
        ),
        Demand(
            "20 % over the error of nine steps in ten",
            1.0,
            0.2 / most("p90 error"),
        ),
        Demand("Kendall's tau of predicted and measured order", 0.9, worst("tau")),
        Demand("5 % over the regret", 1.0, 0.05 / most("regret")),
        Demand("against the fastest alone, anywhere", 0.98, worst("vs_alone")),
        Demand(
            "super-resolution against alone on cpu,cpu@0.5",
            1.25,
            worst("vs_alone", of_pair | {"mode": "infer"}),
        ),
        Demand(
            "the same in training", 1.05, worst("vs_alone", of_pair | {"mode": "train"})
        ),
        Demand(
            "10 % over a split's step without messages",
            1.0,
            1.1 / max(of_bound) if of_bound else None,
        ),
        Demand(
            "against even on cpu,cpu@0.5", 1.35, worst("vs_even", {"pair": PAIRS[0]})
        ),
        Demand(
            "against even on cpu,cpu@0.25", 1.8, worst("vs_even", {"pair": PAIRS[1]})
        ),
    ]
