"""The graph that a run records, and the model, which is left as it was."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv.operators.elementwise import Pointwise
from hetconv.operators.norms import BatchNorm
from hetconv.operators.pooling import GlobalAveragePool, Pool
from hetconv.operators.shapes import Cat
from hetconv.sharding.layer_rules import Conv, Linear
from hetconv.sharding.rule import Gather
from tests.nets import ResNet, UNet


def test_layers_have_their_module_names_and_whole_shapes() -> None:
    graph = hetconv.capture(ResNet(), torch.randn(2, 3, 45, 40))
    assert list(graph.layers) == [
        "stem",
        "blocks.0.conv1",
        "blocks.0.conv2",
        "blocks.1.down.0",
        "blocks.1.conv1",
        "blocks.1.conv2",
        "head",
    ]
    stem, head = graph.layers["stem"], graph.layers["head"]
    assert isinstance(stem, Conv)
    assert stem.spec.x_shape == (2, 3, 45, 40)
    assert stem.spec.y_shape == (2, 8, 23, 20)
    assert isinstance(head, Linear)
    assert head.y_shape == (2, 5)


def test_operators_are_read_as_the_runtime_reads_them() -> None:
    graph = hetconv.capture(ResNet(), torch.randn(2, 3, 45, 40))
    kinds = [type(node.op) for node in graph.nodes]
    assert kinds[:4] == [Conv, BatchNorm, Pointwise, Pool]
    assert GlobalAveragePool in kinds
    assert Gather not in kinds


def test_what_has_no_rule_gathers() -> None:
    class Unfolded(UNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.unfold(
                torch.kthvalue(super().forward(x), 2, -1, keepdim=True)[0], 1
            )

    graph = hetconv.capture(Unfolded(), torch.randn(1, 3, 16, 16))
    assert [
        n.name.rpartition("_")[0] for n in graph.nodes if isinstance(n.op, Gather)
    ] == ["kthvalue", "unfold"]
    assert any(isinstance(n.op, Cat) for n in graph.nodes)


def test_nothing_changes_and_random_numbers_go_on() -> None:
    model = ResNet()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    hetconv.capture(model, torch.ones(2, 3, 45, 40))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_gradients_are_known_to_flow_or_not() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    graph = hetconv.capture(model, torch.randn(1, 3, 8, 8))
    assert not graph.values[graph.inputs[0]].requires_grad
    assert graph.values[graph.outputs[0]].requires_grad
    with torch.no_grad():
        graph = hetconv.capture(model, torch.randn(1, 3, 8, 8))
    assert not graph.values[graph.outputs[0]].requires_grad


def test_in_place_results_are_new_values() -> None:
    graph = hetconv.capture(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)),
        torch.randn(1, 3, 8, 8),
    )
    conv, relu = graph.nodes
    assert relu.inputs == conv.outputs
    assert graph.outputs == relu.outputs != conv.outputs


def test_a_layer_that_runs_twice_is_one_layer() -> None:
    conv = nn.Conv2d(4, 4, 3, padding=1)
    graph = hetconv.capture(
        nn.Sequential(conv, nn.ReLU(), conv), torch.randn(1, 4, 8, 8)
    )
    assert [n.layer for n in graph.nodes] == ["0", None, "0"]
    assert list(graph.layers) == ["0"]


class Doubled(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_model_that_is_one_layer_has_its_result() -> None:
    graph = hetconv.capture(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8))
    assert list(graph.layers) == [""]
    assert [graph.values[i].shape for i in graph.outputs] == [(1, 4, 6, 6)]


def test_layers_that_cannot_be_swapped_are_not_named() -> None:
    tied, other = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    other.weight = tied.weight
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))
    model = nn.Sequential(nn.Conv2d(4, 4, 1), tied, other, Doubled(4, 4, 1), normed)
    assert list(hetconv.capture(model, torch.randn(1, 4, 8, 8)).layers) == ["0"]


def test_the_digest_is_that_of_operators_and_shapes() -> None:
    small, again = (
        hetconv.capture(ResNet(), torch.randn(2, 3, 45, 40)) for _ in range(2)
    )
    assert small.digest == again.digest
    assert small.digest != hetconv.capture(ResNet(), torch.randn(2, 3, 45, 41)).digest
