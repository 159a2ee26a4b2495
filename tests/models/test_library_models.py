"""Serial equivalence of models from libraries, under planned, all-height, all-filter
and all-depth plans.
"""

from __future__ import annotations

import copy
import warnings
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

import pytest
import torch

import hetconv
from hetconv.planner.partition import whole_model
from hetconv.schemas.plan import Plan
from hetconv.sharding.rule import Gather
from hetconv.tracing.graph import Graph
from tests.equivalence import (
    Differences,
    apart,
    from_rank_0,
    full_gradients,
    leaves,
    loss_of,
    one_step,
    relative,
    same_state,
)
from tests.spawn import on_ranks
from tests.zoo import ZOO

Kind = Literal["planned", "height", "filter", "depth"]
CUTS = [
    (name, kind)
    for name, (_, shape) in ZOO.items()
    for kind in get_args(Kind)
    if kind != "depth" or len(shape) == 5
]
RATIOS = {2: (3, 1), 3: (2, 1, 1)}
TOLERANCE = 1e-9
ATTENTION = {"scaled_dot_product_attention"}  # every pixel reads every other
GATHERS = {
    "diffusers AutoencoderKL": ATTENTION,
    "diffusers UNet2DModel": ATTENTION,
}  # in training, by a height plan

# Only ranks import them, which takes seconds.
for library in ("transformers", "diffusers", "monai"):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed", allow_module_level=True)


def scaled(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """The largest difference, by the largest number if that is above 1: many gradients
    are 0 but for rounding.
    """
    largest = float(b.detach().abs().max()) if b is not None and b.numel() else 0.0
    return apart(a, b) / max(largest, 1.0)


@cache
@from_rank_0
def planned(name: str, world: int, dtype: torch.dtype) -> tuple[Graph, Plan]:
    """A rank keeps them: most of a test's time would go into making the same again."""
    make, shape = ZOO[name]
    graph = hetconv.capture(make().to(dtype).train(), torch.zeros(shape, dtype=dtype))
    profile = hetconv.ClusterProfile.from_devices(
        ["cpu", "cpu@0.5", "cpu@0.5"][:world], link="host"
    )
    return graph, hetconv.make_plan(graph, profile)


def plan_for(name: str, kind: Kind, world: int) -> Plan:
    graph, plan = planned(name, world, torch.get_default_dtype())
    if kind == "planned":
        return plan
    return plan.with_splits(
        whole_model(
            graph,
            kind,
            RATIOS[world],
            (kind, "filter") if kind == "filter" else (kind,),
        )
    )


def trained(name: str, kind: Kind, world: int) -> Differences:
    """Differences of outputs, all gradients and buffers of one step in training, then
    of the output in evaluation.
    """
    make, shape = ZOO[name]
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    serial = make().double().train()
    cut = copy.deepcopy(serial)
    x = torch.randn(shape)
    cut = hetconv.parallelize(cut, plan_for(name, kind, world))
    found = one_step(serial, cut, x, by=scaled) | same_state(serial, cut)
    serial.eval(), cut.eval()
    with torch.no_grad():
        pairs = zip(leaves(cut(x)), leaves(serial(x)), strict=True)
        return found | {
            f"evaluated output {i}": scaled(a, b) for i, (a, b) in enumerate(pairs)
        }


def assert_equal(found: list[Differences]) -> None:
    wrong = [
        {k: v for k, v in differences.items() if not v <= TOLERANCE}
        for differences in found
    ]
    assert not any(wrong), wrong


@pytest.mark.parametrize(("name", "kind"), CUTS)
def test_two_unequal_ranks_compute_what_one_does(name: str, kind: Kind) -> None:
    assert_equal(on_ranks(2, trained, name, kind, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [cut for cut in CUTS if cut[1] in ("planned", "height")]
)
def test_three_unequal_ranks_compute_what_one_does(name: str, kind: Kind) -> None:
    assert_equal(on_ranks(3, trained, name, kind, 3))


def in_single_precision(name: str) -> tuple[float, float]:
    """Errors of the output and of all gradients together."""
    make, shape = ZOO[name]
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    serial = make().eval()
    cut = copy.deepcopy(serial)
    x = torch.randn(shape)
    cut = hetconv.parallelize(cut, plan_for(name, "height", 2))
    results = [serial(x), cut(x)]
    for y in results:
        loss_of(y).backward()
    outputs = [torch.cat([y.detach().flatten() for y in leaves(r)]) for r in results]
    both = {name: p.grad for name, p in serial.named_parameters()}, full_gradients(cut)
    gradients = [
        torch.cat([g.flatten() for g in by_name.values() if g is not None])
        for by_name in both
    ]
    return relative(outputs[1], outputs[0]), relative(gradients[1], gradients[0])


@pytest.mark.parametrize("name", ZOO)
def test_single_precision_under_a_height_plan(name: str) -> None:
    for output, gradients in on_ranks(2, in_single_precision, name):
        assert output <= 1e-4
        assert gradients <= 1e-4


@pytest.mark.parametrize("name", ZOO)
def test_what_is_gathered_under_a_height_plan(name: str) -> None:
    """By the plan's own walk: operators that no rule takes, whose input is on parts."""
    make, shape = ZOO[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = hetconv.capture(make(), torch.zeros(shape))
    gathers = {n.function for n in graph.nodes if isinstance(n.op, Gather)}
    assert gathers <= GATHERS.get(name, set())
