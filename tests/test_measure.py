"""Measuring on ranks: whatever each needs, all make the same collective calls; and what becomes of the samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv import emulate
from hetconv.autotune import measure, sampling
from hetconv.autotune.sampling import Passes
from hetconv.autotune.subjects import KINDS, Call, Layer, Other, Run, Time, local, of_rows, subjects_of
from hetconv.cost import kind_of, operator_key
from hetconv.emulate import DeviceName
from hetconv.pricing import Pricer
from hetconv.profile import ClusterProfile, LinkModel
from hetconv.rules import Conv, Linear, Split
from hetconv.spec import ConvSpec
from hetconv.tensor import HetTensor

from .nets import OTHER_RANKS, MobileBlock, ResNet
from .spawn import on_ranks

CPU = torch.device("cpu")
CONV = Conv(ConvSpec(2, 6, (9, 8), 8, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))
ONCE = sampling.LEAST


@dataclass(frozen=True)
class Uneven:
    """A subject that each rank needs other work for; notes when it ran on this one."""

    alone: bool = False
    fails_on: int = -1
    key: str = "uneven"
    ran: list[tuple[float, float]] = field(default_factory=list, compare=False)

    def samples(self, time_: Time, device: torch.device) -> dict[float, Passes]:
        start, rank = time.monotonic(), dist.get_rank()
        if rank == self.fails_on:
            raise torch.OutOfMemoryError("no more")
        run = Run(lambda: time.sleep(0.001), lambda: None)
        found = {float(share): time_(run) for share in range(1, 2 + 3 * rank)}
        self.ran.append((start, time.monotonic()))
        return found


def uneven(alone: bool, fails_on: int) -> tuple[list[int], tuple[float, float] | None]:
    """How many shares were measured of each subject, and when the first one ran."""
    subjects: Any = [Uneven(alone, fails_on), Uneven(alone)]
    found = [len(samples) for _, samples in measure.operator_samples(subjects, CPU, lambda: False)]
    dist.barrier()  # every rank comes here
    return found, subjects[0].ran[0] if subjects[0].ran else None


@pytest.mark.parametrize("alone", [False, True])
def test_ranks_stay_in_step_however_much_each_measures(alone: bool) -> None:
    found = on_ranks(3, uneven, alone, -1)
    assert [counts for counts, _ in found] == [[1, 1], [4, 4], [7, 7]]
    spans = [span for _, span in found]
    in_turn = all(a is not None and b is not None and a[1] <= b[0] for a, b in pairwise(spans))
    assert in_turn is alone


@pytest.mark.parametrize("alone", [False, True])
def test_a_rank_without_the_memory_has_no_samples_and_stays_in_step(alone: bool) -> None:
    assert [counts for counts, _ in on_ranks(3, uneven, alone, 1)] == [[1, 1], [0, 4], [7, 7]]


def stopped_early() -> list[str]:
    subjects: Any = [Uneven(key=key) for key in "abc"]
    rank_0_had_enough = iter([True, False, dist.get_rank() == 0])
    return [key for key, _ in measure.operator_samples(subjects, CPU, lambda: next(rank_0_had_enough))]


def test_rank_0_says_when_it_is_enough_but_something_is_measured() -> None:
    assert on_ranks(2, stopped_early) == [["a", "b"]] * 2


def loaded() -> int:
    """How often a rank that is done runs on while the other one still measures."""
    calls = 0

    @dataclass(frozen=True)
    class Long:
        key: str = "long"
        alone: bool = False

        def samples(self, time_: Time, device: torch.device) -> dict[float, Passes]:
            nonlocal calls

            def forward() -> None:
                nonlocal calls
                calls += 1

            time_(Run(forward, lambda: None))
            calls = 0
            if dist.get_rank():
                time.sleep(0.3)
            return {}

    dict(measure.operator_samples([Long()], CPU, lambda: False))  # type: ignore[list-item]
    return calls


def test_who_is_done_keeps_up_the_load() -> None:
    first, last = on_ranks(2, loaded)
    assert first > 10 * max(last, 1)


class Clock:
    """Of time.perf_counter; calls move it on."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0

    def call(self, seconds: float) -> None:
        self.now += seconds
        self.calls += 1


@pytest.mark.parametrize(("seconds", "calls"), [(1e-5, 20), (6e-5, 3), (1.0, 1)])
def test_short_calls_are_timed_together(seconds: float, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    watch = measure.stopwatch(lambda: clock.call(seconds), CPU)
    assert watch() == pytest.approx(seconds)
    assert clock.calls == 1
    assert watch() == pytest.approx(seconds)
    assert clock.calls == 1 + calls


def test_forward_is_taken_off_where_backward_runs_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    run = Run(lambda: clock.call(1.0), lambda: clock.call(3.0), both=True)
    forward, backward = measure._passes(run, CPU)
    assert set(forward) == {1.0}
    assert set(backward) == {2.0}
    assert set(measure._passes(run._replace(both=False), CPU)[1]) == {3.0}


def once(run: Run) -> Passes:
    """Runs both calls, and says that each took a second."""
    run.forward(), run.backward()
    return [1.0], [1.0]


def shares(layers: list[Layer]) -> list[list[float]]:
    return [list(layer.samples(once, CPU)) for layer in layers]


def test_layers_are_run_in_whole_parts() -> None:
    wide = Conv(replace(CONV.spec, K=128, groups=2, C=6))
    pixels, filters, halves = (
        Layer(CONV, "pixels", "float32"), Layer(CONV, "filters", "float32"), Layer(wide, "filters", "float32"),
    )  # fmt: skip
    assert shares([pixels])[0] == [n / 9 for n in (1, 2, 3, 6, 9)]
    assert shares([filters])[0] == [n / 8 for n in (1, 2, 5, 8)]
    assert shares([halves])[0] == [n / 64 for n in (16, 32, 64)]  # multiples of 16 in each group
    assert shares([replace(pixels, alone=True)])[0] == [1.0]
    dense = Linear((2, 3, 5), 7)
    assert shares([Layer(dense, "pixels", "float32"), Layer(dense, "filters", "bfloat16")]) == [
        [1 / 6, 2 / 6, 4 / 6, 1.0], [1 / 7, 2 / 7, 4 / 7, 1.0],
    ]  # fmt: skip


@pytest.mark.parametrize("case", OTHER_RANKS)
def test_sequences_and_volumes_are_run_along_both_axes(case: str) -> None:
    make, shape = OTHER_RANKS[case]
    subjects = subjects_of(hetconv.capture(make(), torch.zeros(shape)))
    layers = [s for s in subjects if isinstance(s, Layer) and not s.alone]
    assert {layer.axis for layer in layers} == {"pixels", "filters"}
    assert all(found[-1] == 1.0 for found in shares(layers))


def test_a_share_of_the_pixels_is_one_of_the_first_dimension() -> None:
    spec = ConvSpec(2, 3, (9, 8, 7), 4, (2, 3, 1), (2, 1, 3), ((1, 0), (1, 1), (0, 0)), (1, 2, 1))
    assert [of_rows(spec, n).y_shape for n in (1, 3)] == [(2, 4, n, *spec.y_shape[3:]) for n in (1, 3)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_layers_run_in_the_model_s_dtype_and_memory_format(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    real = hetconv.kernels.conv_backward

    def noted(g: Tensor, x: Tensor, w: Tensor, *args: Any) -> Any:
        seen.extend((g, x, w))
        return real(g, x, w, *args)

    monkeypatch.setattr(hetconv.kernels, "conv_backward", noted)
    layer = Layer(Conv(replace(CONV.spec, dtype=dtype)), "pixels", dtype)
    once(layer.run(9, CPU))
    assert [t.shape for t in seen] == [CONV.spec.y_shape, CONV.spec.x_shape, CONV.spec.w_shape]
    assert all(t.dtype == getattr(torch, dtype) for t in seen)
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in seen)


def test_weights_are_as_cold_as_in_a_step() -> None:
    """Of a model that fits into the caches, one set; of a large one, a new set each time."""
    own = 4 * sum(t.numel() for t in (torch.empty(CONV.spec.x_shape), torch.empty(CONV.spec.w_shape)))
    for between, count in ((own, 1), (3 * own, 3), (1 << 40, 32)):
        _, _, sets = Layer(CONV, "pixels", "float32", between=between)._tensors(
            CONV.spec.x_shape, CONV.spec.w_shape, CONV.spec.y_shape, CPU
        )
        weights = [next(sets)[1].data_ptr() for _ in range(64)]
        assert len(set(weights)) == count
        assert all(a == b for a, b in zip(weights, weights[count:], strict=False))


def kinds_run(alone: bool) -> tuple[dict[str, list[float]], set[tuple[type, type]]]:
    """The sizes of each kind, and of what type are inputs and results."""
    types = set()

    def noted(compute: Callable[..., Tensor], x: Tensor, *rest: Tensor) -> Tensor:
        y = compute(x, *rest)
        types.add((type(x), type(y)))
        return y

    with pytest.MonkeyPatch.context() as patch:
        for kind, compute in KINDS.items():
            patch.setitem(KINDS, kind, partial(noted, compute))
        return {kind: list(Other(kind, "float32", alone).samples(once, CPU)) for kind in KINDS}, types


def test_every_other_kind_runs_on_parts_and_plain() -> None:
    ((found, types),), ((plain, plain_types),) = on_ranks(1, kinds_run, False), on_ranks(1, kinds_run, True)
    assert (types, plain_types) == ({(HetTensor, HetTensor)}, {(Tensor, Tensor)})
    assert found == plain
    assert all(sizes == sorted(sizes) and len(sizes) == 5 for sizes in found.values())
    assert found["elementwise"][0] == 2 * 4 * 64 * 16
    assert found["max pool"][0] == 4 * 64 * (16 + 4)


def test_every_kind_that_is_priced_can_be_measured() -> None:
    net = nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.ReLU(),
        nn.Upsample(scale_factor=2), nn.ConvTranspose2d(4, 4, 2), nn.BatchNorm2d(4).eval(),
    )  # fmt: skip
    graph = hetconv.capture(net, torch.zeros(2, 4, 16, 16))
    assert {kind_of(node.op) for node in graph.nodes} - {None} == set(KINDS)


def test_equal_layers_are_one_subject_and_the_largest_comes_first() -> None:
    graph = hetconv.capture(ResNet(), torch.zeros(2, 3, 45, 40))
    subjects = subjects_of(graph)
    keys = [subject.key for subject in subjects]
    assert len(set(keys)) == len(keys)
    layers = [s for s in subjects if isinstance(s, Layer)]
    assert {(s.op, s.alone) for s in layers} == {(op, alone) for op in graph.layers.values() for alone in (False, True)}
    assert layers[0].op == max(graph.layers.values(), key=lambda op: op.spec.flops if isinstance(op, Conv) else 0)
    assert {s.key for s in subjects if isinstance(s, Other)} >= {
        "batch norm in training float32",
        "elementwise float32",
    }
    assert [s.alone for s in subjects if isinstance(s, Call)] == [False, True]
    depthwise = [s for s in subjects_of(hetconv.capture(MobileBlock(), torch.zeros(2, 4, 12, 11)))
                 if isinstance(s, Layer) and isinstance(s.op, Conv) and s.op.spec.groups == s.op.spec.K]  # fmt: skip
    assert {s.axis for s in depthwise} == {"pixels"}


def called(speed: float) -> tuple[Passes, Passes]:
    emulate.set_speed(speed)
    try:
        return tuple(Call(alone).samples(lambda run: measure._passes(run, CPU), CPU)[1.0] for alone in (False, True))  # type: ignore[return-value]
    finally:
        emulate.set_speed(1.0)


def test_a_call_takes_the_host_some_microseconds() -> None:
    ((parts, plain),) = on_ranks(1, called, 1.0)
    assert all(0 <= s < 0.1 for passes in (*parts, *plain) for s in passes)
    assert max(parts[1]) > 0


def samples_of(layer: Layer) -> measure.Samples:
    """Made up: a second per whole kernel, half of it alone; calls of a quarter, others of a microsecond per byte."""
    whole = {0.5: ([0.5], [1.0]), 1.0: ([1.0], [2.0])}
    return {
        layer.key: whole,
        replace(layer, axis="filters").key: whole,
        replace(layer, alone=True).key: {1.0: ([0.5], [1.5])},
        "call": {1.0: ([0.25], [0.75])},
        "call alone": {1.0: ([0.125], [0.25])},
        "elementwise float32": {1000.0: ([1e-3], [2e-3]), 2000.0: ([2e-3], [4e-3])},
        "elementwise float32 alone": {1000.0: ([1e-4], [2e-4]), 2000.0: ([2e-4], [4e-4])},
        "max pool float32": {},
    }


def model_of() -> Any:
    layer = Layer(CONV, "pixels", "float32")
    subjects = [layer, replace(layer, axis="filters"), replace(layer, alone=True), Call(), Call(True)]
    others = [Other(kind, "float32", alone) for kind in ("elementwise", "max pool") for alone in (False, True)]
    return measure.device_model(DeviceName("cpu"), CPU, samples_of(layer), [*subjects, *others], 1e9)


def test_a_device_is_what_its_samples_say() -> None:
    model, key = model_of(), operator_key(CONV, "pixels", "float32")
    assert model.flops_per_s == {"float32": CONV.spec.flops}
    assert (model.overhead_s, model.backward_overhead_s, model.backward_ratio) == (0.25, 0.75, 2.0)
    assert model.operators[key].forward.seconds == (0.75, 1.25)  # with the host's call
    assert model.operators[key].backward.seconds == (1.75, 2.75)
    assert set(model.operators) == {key, operator_key(CONV, "filters", "float32")}
    assert list(model.others) == ["elementwise float32"]
    alone = model.by_itself()
    for axis in ("pixels", "filters"):
        whole = alone.operators[operator_key(CONV, axis, "float32")]
        assert (whole.forward.at(1.0), whole.backward.at(1.0)) == (0.625, 1.75)
    assert alone.others["elementwise float32"].forward.at(1000) == 1e-4
    assert (alone.overhead_s, alone.backward_overhead_s) == (0.125, 0.25)


def test_a_device_of_which_nothing_was_measured_still_has_a_roofline() -> None:
    model = measure.device_model(DeviceName("cpu"), CPU, {}, [], 1e9)
    assert model.flops_per_s == {"float32": measure.UNKNOWN}
    assert model.alone is None


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


def test_what_was_measured_is_what_is_predicted() -> None:
    graph, model = hetconv.capture(Two(), torch.zeros(2, 6, 9, 8)), model_of()
    profile = ClusterProfile((model, model), {"0-1": LinkModel(0.0, 0.0)})
    moved = 2 * 4 * 2 * 8 * 9 * 8  # bytes that relu reads and writes
    busy = Pricer(graph, profile, "train").price({"conv": Split("filter", (8, 0))})[0].busy_s
    assert busy == (pytest.approx(1.25 + 2.75 + 3e-6 * moved), 0.0)
    alone = Pricer(graph, profile.alone(), "train").price({"conv": Split("filter", (8, 0))})[0].busy_s
    assert alone == (pytest.approx(0.625 + 1.75 + 3e-7 * moved), 0.0)


def test_local_parts_are_themselves() -> None:
    x = torch.ones(2)
    assert local(x) is x
