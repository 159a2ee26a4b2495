"""What is measured: layers in whole parts and along their axes, other kinds of
operators, each once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hetconv
from hetconv.autotune.measure.layer_workloads import (
    AXES,
    LayerWorkload,
    axes_of,
    kernel_grain,
    of_rows,
    workloads_of,
)
from hetconv.autotune.measure.other_workloads import (
    KINDS,
    DispatchOverhead,
    NonLayerOperator,
    local,
)
from hetconv.autotune.measure.sampling import PassCalls, Passes
from hetconv.cost.operator_cost import kind_of
from hetconv.kernels import is_channels_last
from hetconv.runtime.het_tensor import HetTensor
from hetconv.sharding.conv_spec import ConvSpec, MemoryFormat
from hetconv.sharding.layer_rules import Conv, Linear
from tests.nets import OTHER_RANKS, MobileBlock, ResNet
from tests.spawn import on_ranks

CPU = torch.device("cpu")
CONV = Conv(ConvSpec(2, 6, (9, 8), 8, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))


def once(calls: PassCalls) -> Passes:
    """Runs both calls, and says that each took a second."""
    calls.forward(), calls.backward()
    return Passes([1.0], [1.0])


def shares(layers: list[LayerWorkload]) -> list[list[float]]:
    return [list(layer.samples(once, CPU)) for layer in layers]


def processor(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)


def test_layers_are_run_in_whole_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    processor("AVX512", monkeypatch)
    wide = Conv(replace(CONV.spec, K=256, groups=2, C=6))
    pixels, filters, halves = (
        LayerWorkload(CONV, "pixels", "float32"),
        LayerWorkload(CONV, "filters", "float32"),
        LayerWorkload(wide, "filters", "float32"),
    )
    assert shares([pixels])[0] == [n / 9 for n in (1, 2, 3, 6, 9)]
    assert shares([filters])[0] == [n / 8 for n in (1, 2, 5, 8)]
    assert shares([halves])[0] == [
        n / 128 for n in (16, 32, 80, 128)
    ]  # multiples of 16 in each group
    dense = Linear((2, 3, 5), 7)
    assert shares(
        [
            LayerWorkload(dense, "pixels", "float32"),
            LayerWorkload(dense, "filters", "bfloat16"),
        ]
    ) == [
        [1 / 6, 2 / 6, 4 / 6, 1.0],
        [1 / 7, 2 / 7, 4 / 7, 1.0],
    ]
    assert shares([LayerWorkload(dense, "channels", "float32")])[0] == [
        1 / 5,
        2 / 5,
        3 / 5,
        1.0,
    ]
    deep = Conv(replace(CONV.spec, C=40))
    by_channels = LayerWorkload(deep, "channels", "float32")
    assert shares([by_channels])[0] == [16 / 40, 1.0]  # whole grains first
    assert by_channels.granularity(CPU) == (40, 16)
    for other in (
        pixels,
        halves,
        LayerWorkload(dense, "filters", "float32"),
        replace(by_channels, cut=16),
    ):
        assert other.granularity(CPU) is None
    assert shares([replace(by_channels, cut=16)])[0] == [
        16 / 40,
        1.0,
    ]  # as plans cut it


def test_short_vectors_hold_fewer_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    processor("AVX2", monkeypatch)
    assert [kernel_grain(torch.device(name)) for name in ("cpu", "cuda")] == [8, 16]
    wide = Conv(replace(CONV.spec, K=20))
    filters = LayerWorkload(wide, "filters", "float32")
    assert shares([filters])[0] == [8 / 20, 1.0]
    assert filters.granularity(CPU) == (20, 8)


def test_what_was_measured_is_measured_again_at_the_same_shares() -> None:
    for axis in AXES:
        assert list(
            LayerWorkload(CONV, axis, "float32").samples(once, CPU, [1 / 3, 2 / 3])
        ) == [1 / 3, 2 / 3]


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
    workloads = workloads_of(hetconv.capture(make(), torch.zeros(shape)), 2)
    layers = [s for s in workloads if isinstance(s, LayerWorkload)]
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
    layer = LayerWorkload(Conv(replace(CONV.spec, dtype=dtype)), "pixels", dtype)
    once(layer.calls(9, CPU))
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
        _, _, sets = LayerWorkload(CONV, "pixels", "float32", between=between)._tensors(
            CONV.spec.x_shape, CONV.spec.w_shape, CONV.spec.y_shape, "float32", CPU
        )
        weights = [next(sets)[1].data_ptr() for _ in range(64)]
        assert len(set(weights)) == count
        assert all(a == b for a, b in zip(weights, weights[count:], strict=False))


def pointers_of_results() -> tuple[float, list[list[int]]]:
    """Bytes that the operator moves, and where nine results of each pass lie."""
    written: list[int] = []

    def noted(x: HetTensor, *_: Tensor) -> Tensor:
        y = torch.relu(x)
        written.append(local(y).data_ptr())
        return y

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "elementwise", noted)
        operator = NonLayerOperator("elementwise", "float32", 3 * 4 * 64 * 16**2)
        size, calls = operator.calls(16, CPU)
        for call in (calls.forward, calls.backward):
            call()
            written.clear()
            for _ in range(9):
                call()
            found.append([*written])
    return size, found


def test_results_lie_where_nothing_was_for_a_while() -> None:
    ((size, passes),) = on_ranks(1, pointers_of_results)
    assert size == 2 * 4 * 64 * 16**2
    for written in passes:
        assert all(a not in written[max(k - 3, 0) : k] for k, a in enumerate(written))


def kinds_run() -> tuple[dict[str, list[float]], list[float], set[tuple[type, type]]]:
    """The sizes of each kind, some of them again, and of what type inputs and results are."""
    types = set()

    def noted(compute: Callable[..., Tensor], x: Tensor, *rest: Tensor) -> Tensor:
        y = compute(x, *rest)
        types.add((type(x), type(y)))
        return y

    with pytest.MonkeyPatch.context() as patch:
        for kind, compute in KINDS.items():
            patch.setitem(KINDS, kind, partial(noted, compute))
        sizes = {
            kind: list(NonLayerOperator(kind, "float32").samples(once, CPU))
            for kind in KINDS
        }
        again = NonLayerOperator("max pool", "float32").samples(
            once, CPU, sizes["max pool"][1:3]
        )
        return sizes, list(again), types


def test_every_other_kind_runs_on_parts() -> None:
    ((found, again, types),) = on_ranks(1, kinds_run)
    assert types == {(HetTensor, HetTensor)}
    assert all(sizes == sorted(sizes) and len(sizes) == 5 for sizes in found.values())
    assert found["elementwise"][0] == 2 * 4 * 64 * 16
    assert found["max pool"][0] == 4 * 64 * (16 + 4)
    assert again == found["max pool"][1:3]


def dispatched() -> dict[float, Passes]:
    """Calls of 5 and 9 seconds, whose kernels take 2 and 3."""
    took = iter([Passes([5.0, 1.0], [9.0]), Passes([2.0], [3.0])])

    def time_passes(calls: PassCalls) -> Passes:
        once(calls)
        return next(took)

    return DispatchOverhead().samples(time_passes, CPU)


def test_dispatch_takes_what_a_call_takes_beside_its_kernels() -> None:
    assert on_ranks(1, dispatched) == [{1.0: Passes([3.0, 0.0], [6.0])}]


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


def test_equal_layers_are_one_workload_and_the_largest_comes_first() -> None:
    graph = hetconv.capture(ResNet(), torch.zeros(2, 3, 45, 40))
    workloads = workloads_of(graph, 2)
    keys = [subject.key for subject in workloads]
    assert len(set(keys)) == len(keys)
    layers = [s for s in workloads if isinstance(s, LayerWorkload)]
    assert {s.op for s in layers} == set(graph.layers.values())
    assert layers[0].op == max(
        graph.layers.values(),
        key=lambda op: op.spec.flops if isinstance(op, Conv) else 0,
    )
    assert {s.key for s in workloads if isinstance(s, NonLayerOperator)} >= {
        "batch norm in training float32",
        "elementwise float32",
    }
    assert sum(isinstance(s, DispatchOverhead) for s in workloads) == 1
    depthwise = [
        s
        for s in workloads_of(
            hetconv.capture(MobileBlock(), torch.zeros(2, 4, 12, 11)), 2
        )
        if isinstance(s, LayerWorkload)
        and isinstance(s.op, Conv)
        and s.op.spec.groups == s.op.spec.K
    ]
    assert {s.axis for s in depthwise} == {"pixels"}


def test_local_parts_are_themselves() -> None:
    x = torch.ones(2)
    assert local(x) is x


@pytest.mark.parametrize("memory_format", get_args(MemoryFormat))
def test_layers_run_in_the_memory_format_of_the_model(
    memory_format: MemoryFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[bool]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            images = [x for x in args if isinstance(x, Tensor) and min(x.shape) > 1]
            if "conv" in func.name() and "backward" not in func.name():
                seen.update(is_channels_last(x) for x in images)
            return func(*args, **(kwargs or {}))

    graph = hetconv.capture(ResNet(), torch.zeros(2, 3, 45, 40))
    measured = [
        w
        for w in workloads_of(graph, 2, memory_format)
        if not isinstance(w, DispatchOverhead)
    ]
    assert {w.memory_format for w in measured} == {memory_format}
    with Watch():
        for workload in measured:
            if isinstance(workload, LayerWorkload):
                workload.samples(once, CPU)
    assert seen == {memory_format == "channels_last"}
