"""Peak bytes of a step, beside what autograd saves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hetconv
from hetconv.cost.estimator import estimate
from hetconv.cost.memory import input_bytes, parameter_bytes, workspace_bytes
from hetconv.cost.memory_timeline import (
    TENSORS_PER_TRAINED_PARAMETER,
    alive_bytes,
    kept_results,
)
from hetconv.planner.partition import whole_model
from hetconv.runtime.het_tensor import HetTensor
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import Mode
from hetconv.sharding.layout import Layout
from hetconv.sharding.split import SplitKind
from hetconv.tracing.graph import Graph
from tests.nets import NETS, plan_of
from tests.spawn import on_ranks

SHAPE = (2, 8, 24, 16)
ON_GPUS = ClusterProfile.from_devices("A10, A10", link="nvlink3")
PROFILE = ClusterProfile.from_devices("cpu, cpu@0.5", link="nvlink3")


class Skip(nn.Module):
    """The first result waits for the last one; a view of the second one is read later
    than itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(n, k, 1) for n, k in ((1, 2), (2, 8), (2, 2))
        )

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        first = self.b(a)[:, :2]
        return self.c(a) + first


def sizes(graph: Graph) -> list[int]:
    found = []
    for node in graph.nodes:
        value = graph.values[node.outputs[0]]
        found.append(
            0 if node.views else torch.Size(value.shape).numel() * value.itemsize
        )
    return found


def test_a_result_lives_until_the_last_reader_of_it_or_of_its_views() -> None:
    graph = hetconv.capture(Skip(), torch.randn(1, 1, 4, 4))
    assert [node.function for node in graph.nodes] == [
        "conv2d",
        "conv2d",
        "getitem",
        "conv2d",
        "add",
    ]
    assert graph.last_readers == (3, 4, 4, 4, 5)
    plane = 4 * 4 * 4
    own = np.array(sizes(graph), dtype=float)[:, None]
    alive = alive_bytes(own, np.arange(5), np.array(graph.last_readers))
    assert alive[:, 0].tolist() == [n * plane for n in (2, 10, 10, 12, 12)]
    # The program refers to all of them while it adds.
    kept = kept_results(graph, "infer")
    assert {node.function for node in kept} == {"conv2d", "add"}


def parameters(graph: Graph, splits: dict[str, hetconv.Split], rank: int) -> float:
    layers = (None, *graph.layers)
    return sum(parameter_bytes(graph, splits, 2, name)[rank] for name in layers)


@pytest.mark.parametrize("net", NETS)
def test_without_messages_the_peak_is_what_the_program_holds(net: str) -> None:
    make, shape = NETS[net]
    graph = hetconv.capture(make(), torch.randn(shape))
    assert graph.lifetimes is not None
    own, last, count = sizes(graph), graph.lifetimes.last, len(graph.nodes)
    splits = dict.fromkeys(graph.layers, hetconv.Split("replicate"))
    fast, _ = estimate(graph, ON_GPUS, splits, "infer")
    held = [sum(own[j] for j in range(k + 1) if last[j] >= k) for k in range(count)]
    constant = parameters(graph, splits, 0) + input_bytes(graph)
    assert fast.memory_bytes == (max(held) + constant,) * 2
    # The filters of one layer are reordered.
    slow, _ = estimate(graph, PROFILE, splits, "infer")
    assert fast.memory_bytes[0] <= slow.memory_bytes[0]
    assert slow.memory_bytes[0] <= fast.memory_bytes[0] + parameters(graph, splits, 0)


def test_training_holds_what_autograd_saves_and_one_gradient_after_the_other() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 1), nn.SiLU(), nn.Conv2d(8, 1, 1))
    graph = hetconv.capture(model, torch.randn(1, 1, 4, 4))
    splits = dict.fromkeys(graph.layers, hetconv.Split("replicate"))
    plane, small, large = 4 * 4 * 4, 4 * (8 + 1), 4 * (8 + 8)
    found, _ = estimate(graph, ON_GPUS, splits, "train")
    constant = TENSORS_PER_TRAINED_PARAMETER * (small + large) + plane
    # The last convolution makes its gradient while the result, what it read and what SiLU
    # read, 8 planes each, are there; then comes SiLU's, and then the first convolution's.
    steps = [
        (1 + 8 + 8) * plane + (1 + 8) * plane + small,
        (1 + 8) * plane + (8 + 8) * plane + small,
        1 * plane + 8 * plane + small + large,
    ]
    assert found.memory_bytes == (constant + max(steps),) * 2


@pytest.mark.parametrize(("mode", "tensors"), [("infer", 1), ("train", 3)])
def test_a_model_without_operators_holds_its_parameters(
    mode: Mode, tensors: int
) -> None:
    model = nn.Identity()
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    graph = hetconv.capture(model, torch.zeros(3))
    found, _ = estimate(graph, PROFILE, {}, mode)
    assert found.memory_bytes == (4 * 3 + tensors * 4 * 2,) * 2


def test_convolutions_on_a_cpu_need_memory_beside_their_results() -> None:
    def workspace(layer: nn.Module, *shape: int) -> list[float]:
        (node,) = hetconv.capture(layer, torch.empty(shape)).nodes
        split = hetconv.Split("replicate")
        layouts = (Layout.replicated(shape, 2),)
        sharding = node.op.sharding(layouts, split)
        return workspace_bytes(node.op, split, sharding, 4).tolist()

    filters = 4 * 6 * 4 * 9
    assert workspace(nn.Conv2d(4, 6, 3), 2, 4, 9, 9) == [filters] * 2
    filters = 4 * 6 * 4 * 27
    assert workspace(nn.Conv3d(4, 6, 3), 2, 4, 5, 5, 5) == [filters] * 2
    columns = 4 * 4 * 27 * 3**3
    assert workspace(nn.Conv3d(4, 6, 3), 1, 4, 5, 5, 5) == [columns] * 2
    columns = 4 * 6 * 27 * 5**3
    transposed = nn.ConvTranspose3d(4, 6, 3)
    assert workspace(transposed, 1, 4, 5, 5, 5) == [columns] * 2
    assert workspace(nn.ReLU(), 2, 4, 9, 9) == [0.0] * 2


def stack() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Conv2d(16, 4, 3),
    )


def saved(kind: SplitKind) -> tuple[float, float, float]:
    """On every rank: bytes that autograd saves, those predicted beside parameters and
    inputs, and layers' results.
    """
    model, x = stack(), torch.randn(SHAPE)
    graph = hetconv.capture(model, x)
    splits = whole_model(graph, kind, (3.0, 1.0), (kind,))
    rank = torch.distributed.get_rank()
    held = parameters(graph, splits, rank) * TENSORS_PER_TRAINED_PARAMETER
    predicted = (
        estimate(graph, PROFILE, splits, "train")[0].memory_bytes[rank]
        - held
        - input_bytes(graph)
    )
    split = hetconv.parallelize(model, plan_of(model, splits, 2))
    others = {p.untyped_storage().data_ptr() for p in (*split.parameters(), x)}
    found, results = {}, []

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in others:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    def note(_: Any, __: Any, y: Tensor) -> None:
        results.append(y.local.nbytes if isinstance(y, HetTensor) else y.nbytes)

    for layer in list(split.children()):
        layer.register_forward_hook(note)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        split(x)
    return sum(found.values()), predicted, sum(results)


@pytest.mark.parametrize("kind", ["height", "filter", "channel", "sample"])
def test_what_training_keeps_is_predicted(kind: SplitKind) -> None:
    for own, predicted, results in on_ranks(2, saved, kind):
        assert own <= predicted
        assert (own > 1.15 * results) == (
            kind == "filter"
        )  # there a layer's input is gathered; halos are a few rows
