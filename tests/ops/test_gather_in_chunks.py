"""A filter split that is gathered in chunks of the batch: the same bits and bytes, sent
while the next is computed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import hetconv
from hetconv import kernels
from hetconv.autotune.measure import overlap
from hetconv.comm.exchange import PendingExchange
from hetconv.comm.rank_group import blocking, count_sent
from hetconv.runtime import throttle
from hetconv.schemas.plan import Plan
from hetconv.schemas.tuning_results import TunedChunks
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.layer_rules import Conv
from hetconv.sharding.split import Split, SplitKind
from hetconv.tracing.fusion import fusible_functions
from tests import interpreter  # noqa: F401 (before ranks are forked, it mends how bfloat16 is multiplied)
from tests.equivalence import relative
from tests.nets import operator_of, plan_of, splits_of
from tests.spawn import on_ranks

RATIOS = [(3, 1), (5, 2, 1), (1, 0, 2), (4, 1, 2, 1)]


class Net(nn.Module):
    """Gathered by the next layer, by an operator without a rule, and as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.bn = nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.two = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.three, self.four = (
            nn.Conv2d(16, 8, 1),
            nn.Conv2d(8, 8, 3, stride=2, padding=1),
        )
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn(self.one(x)))
        return self.four(self.norm(self.three(torch.relu(self.two(y) + y))))


def cut(
    model: nn.Module,
    ratio: tuple[int, ...],
    chunks: int,
    x: Tensor,
    kind: SplitKind = "filter",
) -> nn.Module:
    with torch.no_grad():
        following = fusible_functions(hetconv.capture(model, x))
    plan = plan_of(model, splits_of(model, (kind,), ratio), len(ratio), following)
    layers = {n: replace(layer, chunks=chunks) for n, layer in plan.layers.items()}
    with patch("hetconv.nn.parallelize.fusion_pays", return_value=True):
        return hetconv.parallelize(
            copy.deepcopy(model), replace(plan, layers=layers), fuse=True
        )


def outputs(
    ratio: tuple[int, ...],
    batch: int,
    chunks: int,
    dtype: torch.dtype,
    backend: kernels.backend_choice.Backend,
) -> tuple[dict[str, bool], float]:
    """Whether the bits and the bytes sent are those of one piece, and how far both are
    from the model on one device.
    """
    torch.manual_seed(0)
    model, x = Net().eval().to(dtype), torch.randn(batch, 4, 9, 7).to(dtype)
    whole, split = cut(model, ratio, 1, x), cut(model, ratio, chunks, x)
    kernels.set_backend(backend)
    try:
        with torch.no_grad():
            with count_sent() as sent:
                expected = whole(x)
            with count_sent() as sent_in_chunks:
                found = split(x)
            with blocking():
                in_order = split(x)
            serial = copy.deepcopy(model).double()(x.double())
    finally:
        kernels.set_backend("auto")
    same = {
        "bits": found.equal(expected),
        "in turn": in_order.equal(expected),
        "bytes": sent == sent_in_chunks,
    }
    return same, relative(found, serial)


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("ratio", RATIOS, ids=str)
def test_the_same_bits_and_bytes(ratio: tuple[int, ...], batch: int) -> None:
    for chunks in (2, 4):
        for same, error in on_ranks(
            len(ratio), outputs, ratio, batch, chunks, torch.float64, "auto"
        ):
            assert all(same.values()), same
            assert error <= 1e-14


def test_tritons_bits_do_not_depend_on_the_batch() -> None:
    for same, error in on_ranks(2, outputs, (3, 1), 3, 2, torch.bfloat16, "triton"):
        assert all(same.values()), same
        assert error <= 3e-2


def events(chunks: int) -> list[str]:
    """What the gathered layer does, in order."""
    torch.manual_seed(0)
    model, x = nn.Conv2d(4, 8, 3), torch.randn(4, 4, 6, 6)
    split = cut(model, (1, 1), chunks, x)
    said: list[str] = []
    start, arrived = PendingExchange.__init__, PendingExchange._arrived

    def noted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            said.append(name)
            return run(*args, **options)

        return call

    PendingExchange.__init__, PendingExchange._arrived = (
        noted("send", start),
        noted("wait", arrived),
    )  # type: ignore[method-assign]
    try:
        with (
            torch.no_grad(),
            throttle.listen_to_computations(lambda _: said.append("compute")),
        ):
            split(x)
    finally:
        PendingExchange.__init__, PendingExchange._arrived = start, arrived  # type: ignore[method-assign]
    return said


def test_a_chunk_is_on_its_way_while_the_next_is_computed() -> None:
    assert on_ranks(2, events, 1) == [["compute", "send", "wait"]] * 2
    assert on_ranks(2, events, 3) == [["compute", "send"] * 3 + ["wait"] * 3] * 2


def trained() -> list[Tensor]:
    """Gradients of a model split by height, whose halos travel while own rows are
    computed, and in turn.
    """
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 4, 12, 8)
    found = []
    for wait in (False, True):
        split = hetconv.parallelize(
            copy.deepcopy(model),
            plan_of(model, splits_of(model, ("height",), (2, 1)), 2),
        )
        if wait:
            with blocking():
                split(x).square().sum().backward()
        else:
            split(x).square().sum().backward()
        found.append(
            torch.cat(
                [p.grad.flatten() for p in split.parameters() if p.grad is not None]
            )
        )
    return found


def test_halos_give_the_same_bits_in_turn() -> None:
    for free, in_order in on_ranks(2, trained):
        assert free.equal(in_order)


def test_the_layers_that_chunks_can_help() -> None:
    model = Net()
    splits = splits_of(model, ("filter",), (3, 1)) | {
        "one": Split("height", (1, 1)),
        "three": Split("filter", (8, 0)),
    }
    plan = plan_of(model, splits, 2)
    assert overlap.gathered_layers(plan) == []  # batches of one
    layers = {
        n: replace(x, op=Conv(replace(x.op.spec, N=4)))
        for n, x in plan.layers.items()
        if isinstance(x.op, Conv)
    }
    asked = overlap.gathered_layers(replace(plan, layers=layers))
    assert [(spec.C, spec.K) for spec, _ in asked] == [(16, 16), (8, 8)]
    assert {split for _, split in asked} == {splits["two"], splits["four"]}


CPU = torch.device("cpu")
SPEC = ConvSpec(4, 8, (9, 8), 16, (2, 2), (1, 1), ((0, 1), (0, 1)), (1, 1))
SPLIT = Split("filter", (12, 4))


@pytest.mark.parametrize(
    ("faster", "expected"),
    [
        ({2: 0.9, 4: 0.8}, 4),
        ({2: 0.7, 4: 0.9}, 2),
        ({2: 0.99, 4: 1.2}, 1),
        ({4: 0.5}, 1),
    ],
)
def test_more_than_one_only_if_faster_twice(
    faster: dict[int, float], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last case four chunks are faster at first and slower in the comparison afterwards."""
    calls: list[list[str]] = []
    whole = torch.zeros(1)

    def paired(
        steps: dict[str, Any], rounds: int, device: torch.device
    ) -> dict[str, list[float]]:
        calls.append(list(steps))
        lucky = {} if len(faster) == 1 and len(calls) == 2 else faster
        return {name: [1e-3 * lucky.get(int(name), 1.0)] * rounds for name in steps}

    monkeypatch.setattr(overlap, "paired", paired)
    monkeypatch.setattr(overlap, "gathering", lambda *args: lambda: whole)
    found = overlap.best_chunks(SPEC, SPLIT, CPU, "channels_last")
    assert (found.chunks, found.unchunked_s) == (expected, 1e-3)
    assert found.seconds == pytest.approx(
        1e-3 * (faster[expected] if expected > 1 else 1.0)
    )
    assert calls[0] == ["1", "2", "4"]  # eight are more than there are samples


def test_chunks_with_other_bits_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """ATen may choose how it computes by the size of the batch."""

    def paired(
        steps: dict[str, Any], rounds: int, device: torch.device
    ) -> dict[str, list[float]]:
        return {name: [1e-3 / int(name)] * rounds for name in steps}

    monkeypatch.setattr(overlap, "paired", paired)
    monkeypatch.setattr(
        overlap, "gathering", lambda *args: lambda: torch.tensor(1.0 + (args[3] == 4))
    )
    assert overlap.best_chunks(SPEC, SPLIT, CPU, "channels_last").chunks == 2


def measured() -> tuple[TunedChunks, ...]:
    class Quiet:
        def stage(self, *_: Any) -> None: ...
        def advance(self, *_: Any) -> None: ...

        def detail(self, *_: Any) -> None: ...
        def line(self, *_: Any) -> None: ...

    conv = nn.Conv2d(8, 16, 2, padding="same")
    op = operator_of(conv)
    assert isinstance(op, Conv)
    plan = plan_of(conv, {"": SPLIT}, 2)
    plan = replace(plan, layers={"": replace(plan.layers[""], op=Conv(SPEC))})
    quiet: Any = Quiet()
    assert overlap.tune_chunks(plan, torch.device("cpu"), lambda: True, quiet) == ()
    return overlap.tune_chunks(plan, torch.device("cpu"), lambda: False, quiet)


def test_the_study_measures_on_ranks() -> None:
    for (found,) in on_ranks(2, measured):
        assert (found.spec, found.sizes) == (SPEC, SPLIT.sizes)
        assert found.chunks in (1, 2, 4)
        assert 0 < found.seconds <= found.unchunked_s


def test_a_plan_takes_the_chunks_that_were_measured(tmp_path: Path) -> None:
    model = Net().eval()
    graph = hetconv.capture(model, torch.zeros(4, 4, 9, 7))
    profile = hetconv.ClusterProfile.from_devices(["cpu", "cpu@0.5"])
    plan = hetconv.make_plan(graph, profile, mode="infer", kinds=("filter",))
    assert Counter(x.chunks for x in plan.layers.values()) == {1: 4}
    two = plan.layers["two"]
    assert isinstance(two.op, Conv)
    entry = TunedChunks(two.op.spec, two.split.sizes, 4, 1e-3, 2e-3)
    other = replace(entry, sizes=(15, 1), chunks=2)
    replace(profile, chunks=(other, entry)).save(tmp_path / "cluster.json")
    profile = hetconv.ClusterProfile.load(tmp_path / "cluster.json")
    assert profile.chunks == (other, entry)
    plan = hetconv.make_plan(graph, profile, mode="infer", kinds=("filter",))
    plan.save(tmp_path / "plan.json")
    assert {
        n: x.chunks for n, x in Plan.load(tmp_path / "plan.json").layers.items()
    } == {
        "one": 1,
        "two": 4,
        "three": 1,
        "four": 1,
    }
    assert plan.digest != plan.with_splits({}).digest
