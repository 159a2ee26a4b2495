"""Operators that run on gathered tensors are listed with the bytes sent for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import hetconv
from hetconv.autotune.cli.show import show_gathers, show_plan
from hetconv.comm.rank_group import count_sent
from hetconv.cost.estimator import gathers
from hetconv.schemas.plan import GatheredOp, Plan
from tests.nets import ResNet
from tests.spawn import on_ranks


class Summed(nn.Module):
    """A running sum along the rows, which has no rule, between two convolutions; and
    one of few numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.cumsum(self.a(x), 2))
        return torch.sort(y[:, :1], 2)[0]


def planned(model: nn.Module, *shape: int) -> Plan:
    graph = hetconv.capture(model.eval(), torch.zeros(shape))
    profile = hetconv.ClusterProfile.from_devices(["cpu", "cpu"])
    return hetconv.make_plan(graph, profile, mode="infer", kinds=("height",))


def sent() -> int:
    """Bytes that this rank sends in one inference."""
    model = Summed().eval()
    split = hetconv.parallelize(model, even(planned(model, 1, 3, 8, 6)))
    with torch.no_grad(), count_sent() as counts:
        split(torch.randn(1, 3, 8, 6))
    return sum(counts.values())


def even(plan: Plan) -> Plan:
    return plan.with_splits(dict.fromkeys(plan.splits, hetconv.Split("height", (1, 1))))


def test_operators_without_a_rule_are_listed_with_their_bytes() -> None:
    model = Summed().eval()
    graph = hetconv.capture(model, torch.zeros(1, 3, 8, 6))
    splits = even(planned(model, 1, 3, 8, 6)).splits
    found = gathers(graph, splits, 2, "infer")
    assert [(g.function, g.shape) for g in found] == [
        ("cumsum", (1, 4, 8, 6)),
        ("sort", (1, 1, 8, 6)),
    ]
    assert [g.sent_bytes for g in found] == [
        4 * 8 * 6 * 4,
        8 * 6 * 4,
    ]  # each rank sends its half to the other


def test_nothing_is_listed_where_nothing_gathers() -> None:
    assert planned(ResNet(), 2, 3, 37, 30).gathers == ()


def test_a_plan_file_keeps_them(tmp_path: Path) -> None:
    plan = planned(ResNet(), 2, 3, 37, 30)
    listed = Plan(
        **{**vars(plan), "gathers": (GatheredOp("sort_3", "sort", (1, 2), 5_000_000),)}
    )
    listed.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").gathers == listed.gathers
    assert listed.with_splits({}).gathers == ()


@pytest.mark.parametrize("listed", [True, False])
def test_show_lists_them(listed: bool) -> None:
    plan = planned(ResNet(), 2, 3, 37, 30)
    if listed:
        plan = Plan(
            **{
                **vars(plan),
                "gathers": (GatheredOp("sort_3", "sort", (1, 2), 5_000_000),),
            }
        )
    console = Console(record=True, width=120)
    show_gathers(plan, console)
    show_plan(plan, console)
    text = console.export_text()
    assert ("sort_3" in text and "1x2" in text and "5.00" in text) is listed
    assert ("1 operators run on gathered tensors" in text) is listed
    assert ("no operator gathers" in text) is not listed
    show_gathers(plan.with_splits({}), console)
    assert "changed by hand" in console.export_text()


def test_the_bytes_are_those_sent() -> None:
    assert sum(on_ranks(2, sent)) == 4 * 8 * 6 * 4 + 8 * 6 * 4
