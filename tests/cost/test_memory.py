"""Peak bytes of a step, beside what autograd saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetconv
from hetconv.cost.estimator import estimate
from hetconv.cost.memory import (
    input_bytes,
    kept_results,
    last_readers,
    live_bytes,
    parameter_bytes,
)
from hetconv.planner.partition import whole_model
from hetconv.runtime.het_tensor import HetTensor
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.sharding.split import SplitKind
from hetconv.tracing.graph import Graph
from tests.nets import NETS, plan_of
from tests.spawn import on_ranks

SHAPE = (2, 8, 24, 16)
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
    assert last_readers(graph) == [3, 4, 4, 4, 5]
    plane = 4 * 4 * 4
    own = torch.tensor(sizes(graph), dtype=torch.float64).numpy()[:, None]
    assert live_bytes(own, last_readers(graph))[:, 0].tolist() == [
        n * plane for n in (2, 10, 10, 12, 12)
    ]
    assert {node.function for node in kept_results(graph, "infer")} == {
        "conv2d",
        "getitem",
    }


@pytest.mark.parametrize("net", NETS)
def test_what_lives_together_as_a_run_would_free_it(net: str) -> None:
    make, shape = NETS[net]
    graph = hetconv.capture(make(), torch.randn(shape))
    own, most = sizes(graph), 0
    of: dict[int, set[int]] = {}  # operators whose memory a value is in
    for k, node in enumerate(graph.nodes):
        memory = (
            {k}
            if not node.views
            else set().union(*(of.get(i, set()) for i in node.views))
        )
        of |= dict.fromkeys(node.outputs, memory)
    for k in range(len(graph.nodes)):
        later = [i for node in graph.nodes[k:] for i in node.inputs] + [*graph.outputs]
        needed = set().union(*(of.get(i, set()) for i in later)) | {k}
        most = max(most, sum(own[j] for j in needed if j <= k))
    splits = dict.fromkeys(graph.layers, hetconv.Split("replicate"))
    predicted = estimate(graph, PROFILE, splits, "infer")[0].memory_bytes
    parameters = sum(
        parameter_bytes(graph, splits, 2, "infer", layer)[0]
        for layer in (None, *graph.layers)
    )
    assert predicted == (most + parameters + input_bytes(graph),) * 2


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
    held = sum(
        parameter_bytes(graph, splits, 2, "train", layer)[rank]
        for layer in (None, *graph.layers)
    )
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
