"""Parallelized models with captured steps; a recorder stands in for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

import hetconv
from hetconv.comm.rank_group import no_payload
from hetconv.errors import DisagreementError, HetConvError
from hetconv.nn import model_call
from hetconv.nn.parallelize import _check_graphs
from hetconv.nn.step_graphs import EAGER_STEPS, StepGraphs
from tests.captures import RecordingCapture
from tests.equivalence import assert_same, one_step, pair, same_state
from tests.nets import NETS, Chain, plan_of, splits_of
from tests.spawn import on_ranks

T = TypeVar("T")
CPU = torch.device("cpu")
STEPS = EAGER_STEPS + 3


def trained(net: str, kind: Any) -> tuple[dict[str, float], int]:
    """Largest differences to the serial model over some steps; how many were replayed."""
    make, shape = NETS[net]
    serial, cut = pair(make, splits_of(make(), (kind,), (1,)), 1)
    capture = RecordingCapture(cut)
    cut.forward._context._graphs = StepGraphs(CPU, lambda: capture)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (serial, cut)]
    worst: dict[str, float] = {}
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        found = one_step(serial, cut, torch.randn(shape))
        worst = {name: max(d, worst.get(name, 0.0)) for name, d in found.items()}
        for optimizer in optimizers:
            optimizer.step()
    return worst | same_state(serial, cut), capture.replays


@pytest.mark.parametrize("kind", ["height", "filter"])
@pytest.mark.parametrize("net", ["resnet", "unet"])
def test_a_model_with_captured_steps_is_the_serial_one(net: str, kind: str) -> None:
    found = on_ranks(1, trained, net, kind)
    assert_same([differences for differences, _ in found])
    forward_and_backward = 2
    assert found[0][1] == forward_and_backward * (STEPS - EAGER_STEPS)


class RunAgain:
    """Runs the function once more at each replay."""

    def __init__(self, events: list[str]):
        self._events = events

    def __call__(self, run: Callable[[], T], /) -> tuple[Callable[[], None], T]:
        result = run()

        def replay() -> None:
            self._events.append("launched")
            again: Any = run()
            result.copy_(again)  # type: ignore[attr-defined]

        return replay, result


def chain(events: list[str]) -> Any:
    model = Chain().eval()
    splits = splits_of(model, ("filter",), (3, 1))
    model = hetconv.parallelize(model, plan_of(model, splits, 2))
    model.forward._context._graphs = StepGraphs(CPU, lambda: RunAgain(events))
    return model


def events_of_steps() -> list[list[str]]:
    """What happens in each of several steps, beside computing."""
    events: list[str] = []
    model, found = chain(events), []
    start_consensus = model_call.start_consensus

    def started(*args: Any) -> Callable[[], None]:
        events.append("asked")
        check = start_consensus(*args)
        return lambda: (check(), events.append("agreed"))[0]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(model_call, "start_consensus", started)
        for _ in range(EAGER_STEPS + 2):
            model(torch.ones(2, 4, 16, 16))
            found.append([*events])
            events.clear()
    return found


def test_ranks_agree_while_a_captured_step_runs() -> None:
    eager = ["asked", "agreed"]
    captured, replayed = [*eager, "launched"], ["asked", "launched", "agreed"]
    expected = [*[eager] * EAGER_STEPS, captured, replayed]
    assert on_ranks(2, events_of_steps) == [expected, expected]


def disagreeing() -> str:
    """What comes of a replay on rank 0 while rank 1 calls with another shape."""
    model = chain([])
    with torch.no_grad(), no_payload():
        for _ in range(EAGER_STEPS + 1):
            model(torch.ones(2, 4, 16, 16))
        with pytest.raises(DisagreementError) as raised:
            model(torch.ones(2 + dist.get_rank(), 4, 16, 16))
        model(torch.ones(2, 4, 16, 16))
    return str(raised.value)


def test_ranks_that_disagree_raise_although_one_has_launched() -> None:
    for message in on_ranks(2, disagreeing):
        assert "rank 0" in message
        assert "(3, 4, 16, 16)" in message


def counted() -> list[int]:
    """Forward passes in training that a rank has counted, after each of two calls."""
    model, found = chain([]), []
    for mode in (dist.get_rank() == 0, True):
        model.train(mode)
        with suppress(DisagreementError):
            model(torch.ones(2, 4, 16, 16))
        found.append(model.forward._context._trained)
    return found


def test_forward_passes_that_ranks_disagree_on_are_not_counted() -> None:
    """Else they would compare their replicas in different steps."""
    assert on_ranks(2, counted) == [[0, 1]] * 2


def refused() -> tuple[str, bool]:
    model = Chain()
    plan = plan_of(model, splits_of(model, ("filter",), (3, 1)), 2)
    with pytest.raises(HetConvError, match="graphs=True") as raised:
        hetconv.parallelize(model, plan, graphs=True)
    return str(raised.value), type(model.one) is torch.nn.Conv2d


def test_models_on_cpus_are_refused_on_all_ranks_before_anything_changes() -> None:
    for message, is_unchanged in on_ranks(2, refused):
        assert "['cpu']" in message
        assert is_unchanged


def test_several_ranks_over_gloo_are_refused() -> None:
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    model: Any = SimpleNamespace(parameters=lambda: [on_gpu])
    gloo: Any = SimpleNamespace(size=2, backend="gloo")
    with pytest.raises(HetConvError, match="which gloo cannot"):
        _check_graphs(model, gloo)
    gloo.size = 1
    _check_graphs(model, gloo)
    gloo.size, gloo.backend = 2, "nccl"
    _check_graphs(model, gloo)
