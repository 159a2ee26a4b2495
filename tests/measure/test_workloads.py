"""What is measured: layers in whole parts and along their axes, other kinds of
operators, each once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetconv
from hetconv.autotune.measure import other_workloads
from hetconv.autotune.measure.layer_workloads import (
    AXES,
    Layer,
    axes_of,
    grain_of,
    of_rows,
    subjects_of,
)
from hetconv.autotune.measure.other_workloads import KINDS, Call, Other, local
from hetconv.autotune.measure.sampling import Passes, Run
from hetconv.cost.operator_cost import kind_of
from hetconv.runtime.het_tensor import HetTensor
from hetconv.sharding.conv_spec import ConvSpec
from hetconv.sharding.layer_rules import Conv, Linear
from tests.nets import OTHER_RANKS, MobileBlock, ResNet
from tests.spawn import on_ranks

CPU = torch.device("cpu")
CONV = Conv(ConvSpec(2, 6, (9, 8), 8, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))


def once(run: Run) -> Passes:
    """Runs both calls, and says that each took a second."""
    run.forward(), run.backward()
    return Passes([1.0], [1.0], 1e-3)


def shares(layers: list[Layer]) -> list[list[float]]:
    return [list(layer.samples(once, CPU)) for layer in layers]


def processor(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)


def test_layers_are_run_in_whole_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    processor("AVX512", monkeypatch)
    wide = Conv(replace(CONV.spec, K=256, groups=2, C=6))
    pixels, filters, halves = (
        Layer(CONV, "pixels", "float32"),
        Layer(CONV, "filters", "float32"),
        Layer(wide, "filters", "float32"),
    )
    assert shares([pixels])[0] == [n / 9 for n in (1, 2, 3, 6, 9)]
    assert shares([filters])[0] == [n / 8 for n in (1, 2, 5, 8)]
    assert shares([halves])[0] == [
        n / 128 for n in (16, 32, 80, 128)
    ]  # multiples of 16 in each group
    assert shares([replace(pixels, alone=True)])[0] == [1.0]
    dense = Linear((2, 3, 5), 7)
    assert shares(
        [Layer(dense, "pixels", "float32"), Layer(dense, "filters", "bfloat16")]
    ) == [
        [1 / 6, 2 / 6, 4 / 6, 1.0],
        [1 / 7, 2 / 7, 4 / 7, 1.0],
    ]
    assert shares([Layer(dense, "channels", "float32")])[0] == [
        1 / 5,
        2 / 5,
        3 / 5,
        1.0,
    ]
    deep = Conv(replace(CONV.spec, C=40))
    by_channels = Layer(deep, "channels", "float32")
    assert shares([by_channels])[0] == [16 / 40, 1.0]  # whole grains first
    assert by_channels.steps(CPU) == (40, 16)
    for other in (
        pixels,
        halves,
        Layer(dense, "filters", "float32"),
        replace(by_channels, cut=16),
    ):
        assert other.steps(CPU) is None
    assert shares([replace(by_channels, cut=16)])[0] == [
        16 / 40,
        1.0,
    ]  # as plans cut it


def test_short_vectors_hold_fewer_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    processor("AVX2", monkeypatch)
    assert [grain_of(torch.device(name)) for name in ("cpu", "cuda")] == [8, 16]
    wide = Conv(replace(CONV.spec, K=20))
    filters = Layer(wide, "filters", "float32")
    assert shares([filters])[0] == [8 / 20, 1.0]
    assert filters.steps(CPU) == (20, 8)


def test_what_was_measured_is_measured_again_at_the_same_shares() -> None:
    for axis in AXES:
        assert list(
            Layer(CONV, axis, "float32").samples(once, CPU, [1 / 3, 2 / 3])
        ) == [1 / 3, 2 / 3]
    sizes = list(Other("max pool", "float32", alone=True).samples(once, CPU))
    assert (
        list(Other("max pool", "float32", alone=True).samples(once, CPU, sizes[1:3]))
        == sizes[1:3]
    )


def test_channels_are_measured_where_they_can_be_cut_in_grains() -> None:
    deep = replace(CONV.spec, C=16, K=32)
    assert (
        axes_of(Conv(deep))
        == axes_of(Linear((1, 4), 3))
        == ("pixels", "filters", "channels")
    )
    assert (
        axes_of(Conv(replace(deep, C=8)))
        == axes_of(Conv(replace(deep, groups=2)))
        == ("pixels", "filters")
    )
    assert axes_of(Conv(replace(deep, K=16, groups=16))) == ("pixels",)


@pytest.mark.parametrize("case", OTHER_RANKS)
def test_sequences_and_volumes_are_run_along_both_axes(case: str) -> None:
    make, shape = OTHER_RANKS[case]
    subjects = subjects_of(hetconv.capture(make(), torch.zeros(shape)), 2)
    layers = [s for s in subjects if isinstance(s, Layer) and not s.alone]
    assert {layer.axis for layer in layers} >= {"pixels", "filters"}
    assert all(found[-1] == 1.0 for found in shares(layers))


def test_a_share_of_the_pixels_is_one_of_the_first_dimension() -> None:
    spec = ConvSpec(
        2, 3, (9, 8, 7), 4, (2, 3, 1), (2, 1, 3), ((1, 0), (1, 1), (0, 0)), (1, 2, 1)
    )
    assert [of_rows(spec, n).y_shape for n in (1, 3)] == [
        (2, 4, n, *spec.y_shape[3:]) for n in (1, 3)
    ]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_layers_run_in_the_model_s_dtype_and_memory_format(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    real = hetconv.kernels.conv_backward

    def noted(g: Tensor, x: Tensor, w: Tensor, *args: Any) -> Any:
        seen.extend((g, x, w))
        return real(g, x, w, *args)

    monkeypatch.setattr(hetconv.kernels, "conv_backward", noted)
    layer = Layer(Conv(replace(CONV.spec, dtype=dtype)), "pixels", dtype)
    once(layer.run(9, CPU))
    assert [t.shape for t in seen] == [
        CONV.spec.y_shape,
        CONV.spec.x_shape,
        CONV.spec.w_shape,
    ]
    assert all(t.dtype == getattr(torch, dtype) for t in seen)
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in seen)


def test_weights_are_as_cold_as_in_a_step() -> None:
    """Of a model that fits into the caches, one set; of a large one, a new set each time."""
    own = 4 * sum(
        t.numel()
        for t in (torch.empty(CONV.spec.x_shape), torch.empty(CONV.spec.w_shape))
    )
    for between, count in ((own, 1), (3 * own, 3), (1 << 40, 32)):
        _, _, sets = Layer(CONV, "pixels", "float32", between=between)._tensors(
            CONV.spec.x_shape, CONV.spec.w_shape, CONV.spec.y_shape, CPU
        )
        weights = [next(sets)[1].data_ptr() for _ in range(64)]
        assert len(set(weights)) == count
        assert all(a == b for a, b in zip(weights, weights[count:], strict=False))


def test_results_lie_where_nothing_was_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[int] = []

    def noted(x: Tensor, *_: Tensor) -> Tensor:
        y = torch.relu(x)
        written.append(y.data_ptr())
        return y

    monkeypatch.setitem(KINDS, "elementwise", noted)
    size, run = Other(
        "elementwise", "float32", between=3 * 4 * 64 * 16**2, alone=True
    )._run(16, CPU)
    assert size == 2 * 4 * 64 * 16**2
    for call in (run.forward, run.backward):
        call()
        written.clear()
        for _ in range(9):
            call()
        assert all(a not in written[max(k - 3, 0) : k] for k, a in enumerate(written))


@pytest.mark.parametrize(
    "subject",
    [
        Call(True),
        Other("elementwise", "float32", alone=True),
        Layer(CONV, "pixels", "float32", alone=True),
        Layer(Linear((2, 3, 5), 7), "pixels", "float32", alone=True),
    ],
)
def test_a_device_alone_does_not_sleep_for_every_operator(
    subject: Call | Other | Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the plain model's step that sleeps, once; who measures makes seconds longer."""

    def refused(compute: Callable[[], Any], device: torch.device) -> Any:
        raise AssertionError("it would sleep")

    monkeypatch.setattr(other_workloads, "stretched", refused)
    assert subject.samples(once, CPU)


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
        return {
            kind: list(Other(kind, "float32", alone=alone).samples(once, CPU))
            for kind in KINDS
        }, types


def test_every_other_kind_runs_on_parts_and_plain() -> None:
    ((found, types),), ((plain, plain_types),) = (
        on_ranks(1, kinds_run, False),
        on_ranks(1, kinds_run, True),
    )
    assert (types, plain_types) == ({(HetTensor, HetTensor)}, {(Tensor, Tensor)})
    assert found == plain
    assert all(sizes == sorted(sizes) and len(sizes) == 5 for sizes in found.values())
    assert found["elementwise"][0] == 2 * 4 * 64 * 16
    assert found["max pool"][0] == 4 * 64 * (16 + 4)


def test_every_kind_that_is_priced_can_be_measured() -> None:
    net = nn.Sequential(
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.GroupNorm(2, 4),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
        nn.ReLU(),
        nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(4, 4, 2),
        nn.BatchNorm2d(4).eval(),
    )
    graph = hetconv.capture(net, torch.zeros(2, 4, 16, 16))
    assert {kind_of(node.op) for node in graph.nodes} - {None} == set(KINDS)


def test_equal_layers_are_one_subject_and_the_largest_comes_first() -> None:
    graph = hetconv.capture(ResNet(), torch.zeros(2, 3, 45, 40))
    subjects = subjects_of(graph, 2)
    keys = [subject.key for subject in subjects]
    assert len(set(keys)) == len(keys)
    layers = [s for s in subjects if isinstance(s, Layer)]
    assert {(s.op, s.alone) for s in layers} == {
        (op, alone) for op in graph.layers.values() for alone in (False, True)
    }
    assert layers[0].op == max(
        graph.layers.values(),
        key=lambda op: op.spec.flops if isinstance(op, Conv) else 0,
    )
    assert {s.key for s in subjects if isinstance(s, Other)} >= {
        "batch norm in training float32",
        "elementwise float32",
    }
    assert [s.alone for s in subjects if isinstance(s, Call)] == [False, True]
    depthwise = [
        s
        for s in subjects_of(
            hetconv.capture(MobileBlock(), torch.zeros(2, 4, 12, 11)), 2
        )
        if isinstance(s, Layer)
        and isinstance(s.op, Conv)
        and s.op.spec.groups == s.op.spec.K
    ]
    assert {s.axis for s in depthwise} == {"pixels"}


def test_local_parts_are_themselves() -> None:
    x = torch.ones(2)
    assert local(x) is x
