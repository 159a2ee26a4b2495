"""Normalizations on shards: every function in every placement, models in training, and
what a plan says of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv.cost.estimator import estimate
from hetconv.operators.norms import GroupNorm
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.sharding.layout import Layout
from hetconv.sharding.rule import Gather
from hetconv.sharding.split import SplitKind
from tests.equivalence import Differences, apart, assert_same, loss_of, train
from tests.nets import plan_of, splits_of
from tests.placed import PLACEMENTS, WORLD, Fn, full_gradient, on_parts, placed
from tests.spawn import on_ranks


def running(p: Any) -> tuple[Tensor, Tensor]:
    return p["c"].detach() * 1, p["c"].detach() * 2


FUNCTIONS: dict[str, Fn] = {
    "group_norm": lambda x, z, p: F.group_norm(x, 2, p["c"], p["c"]),
    "of one group": lambda x, z, p: F.group_norm(x, 1, p["c"], p["c"] * 2),
    "torch.group_norm": lambda x, z, p: torch.group_norm(x, 2, p["c"], p["c"], 0.01),
    "by keyword": lambda x, z, p: F.group_norm(
        input=x, num_groups=4, bias=p["c"], weight=p["c"]
    ),
    "of vectors": lambda x, z, p: F.group_norm(
        F.adaptive_avg_pool2d(x, 1).flatten(1), 4, p["c"], p["c"]
    ),
    "of sequences": lambda x, z, p: F.group_norm(x.flatten(2), 2, p["c"], p["c"]),
    "twice": lambda x, z, p: F.group_norm(
        F.silu(F.group_norm(x, 2, p["c"])), 4, p["c"], p["c"]
    ),
    "instance_norm": lambda x, z, p: F.instance_norm(x, weight=p["c"], bias=p["c"]),
    "instance_norm without parameters": lambda x, z, p: F.instance_norm(x, eps=0.1),
    "torch.instance_norm": lambda x, z, p: torch.instance_norm(
        x, p["c"], None, None, None, True, 0.1, 0.2, True
    ),
    "instance_norm evaluating": lambda x, z, p: F.instance_norm(
        x, *running(p), p["c"], p["c"], False
    ),
    "torch.instance_norm evaluating": lambda x, z, p: torch.instance_norm(
        x, p["c"] + 1, p["c"], *running(p), False, 0.1, 0.2, True
    ),
    "torch.batch_norm": lambda x, z, p: torch.batch_norm(
        x, p["c"] + 1, p["c"], *running(p), False, 0.1, 0.2, True
    ),
    "layer_norm": lambda x, z, p: F.layer_norm(x, (5,), p["w"], p["w"]),
    "layer_norm of images": lambda x, z, p: F.layer_norm(
        x, (6, 5), p["hw"], bias=p["hw"]
    ),
    "layer_norm of everything": lambda x, z, p: F.layer_norm(
        x, (8, 6, 5), p["full"][0]
    ),
    "rms_norm": lambda x, z, p: F.rms_norm(x, (5,), p["w"]),
    "rms_norm of images": lambda x, z, p: F.rms_norm(x, (6, 5), p["hw"], 0.1),
    "rms_norm by keyword": lambda x, z, p: torch.rms_norm(
        x, normalized_shape=(5,), weight=p["w"], eps=0.1
    ),
    "local_response_norm": lambda x, z, p: F.local_response_norm(x, 3, 0.5),
}


def all_placements(name: str, dtype: torch.dtype) -> Differences:
    found = {place: on_parts(FUNCTIONS[name], place, dtype) for place in PLACEMENTS}
    return {
        f"{place}: {what}": value
        for place, values in found.items()
        for what, value in values.items()
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str) -> None:
    assert_same(on_ranks(WORLD, all_placements, name, torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    ["group_norm", "instance_norm", "layer_norm of images", "rms_norm of images"],
)
def test_function_in_half_precision(name: str, dtype: torch.dtype) -> None:
    tolerance = {torch.float16: 6e-2, torch.bfloat16: 5e-1}[dtype]
    for found in on_ranks(WORLD, all_placements, name, dtype):
        assert not {
            what: value for what, value in found.items() if not value <= tolerance
        }


def autocast_types() -> set[tuple[str, torch.dtype, torch.dtype]]:
    """(function, type of the own part, type in plain torch), on ranks with and without a part."""
    layout = PLACEMENTS["rows on one rank"]
    found = set()
    with torch.autocast("cpu", torch.bfloat16):
        for name in (
            "group_norm",
            "instance_norm",
            "layer_norm",
            "local_response_norm",
        ):
            p = {"c": torch.ones(8), "w": torch.ones(5)}
            for dtype in (torch.bfloat16, torch.float32):
                whole = torch.rand(layout.shape).to(dtype)
                y, y_true = (
                    FUNCTIONS[name](x, x, p) for x in (placed(whole, layout)[0], whole)
                )
                found.add((name, y.local.dtype, y_true.dtype))
    return found


def test_types_under_autocast_are_those_of_plain_torch() -> None:
    for found in on_ranks(WORLD, autocast_types):
        assert not [each for each in found if each[1] != each[2]]


def far_from_zero(dtype: torch.dtype, offset: float) -> float:
    """The largest difference from the norm of the same numbers in double precision."""
    layout = Layout.sharded((2, 4, 9, 7), 2, (5, 0, 4))
    x = (torch.rand(layout.shape) + offset).to(dtype)
    y = hetconv.gather(F.group_norm(placed(x, layout)[0], 2))
    return apart(y, F.group_norm(x.double(), 2).to(dtype))


@pytest.mark.parametrize(
    ("dtype", "offset"), [(torch.float32, 1000.0), (torch.float16, 30.0)]
)
def test_moments_far_from_zero_are_combined_without_cancellation(
    dtype: torch.dtype, offset: float
) -> None:
    assert max(on_ranks(3, far_from_zero, dtype, offset)) < 1e-2


CUTS: dict[str, tuple[tuple[int, ...], int, tuple[int, int, int]]] = {
    "vectors, one sample each": ((2, 8), 0, (1, 0, 1)),
    "vectors, whole groups": ((5, 8), 1, (4, 4, 0)),
    "vectors, through groups": ((5, 8), 1, (3, 4, 1)),
    "sequences, one sample each": ((3, 8, 4), 0, (1, 1, 1)),
    "sequences": ((3, 8, 6), 2, (4, 0, 2)),
    "sequences, through groups": ((3, 8, 6), 1, (3, 4, 1)),
    "volumes by depth": ((2, 8, 5, 3, 4), 2, (1, 4, 0)),
    "volumes, through groups": ((2, 8, 2, 3, 4), 1, (1, 6, 1)),
}


def of_any_rank(cut: str) -> Differences:
    """Group norm and local response norm of other than images: results and every
    gradient that is asked for.
    """
    shape, dim, sizes = CUTS[cut]
    layout = Layout.sharded(shape, dim, sizes)
    found: Differences = {}
    for asked in ("both", "input", "parameters"):
        torch.manual_seed(1)
        whole, g = (
            torch.randn(shape, dtype=torch.float64),
            torch.randn(shape, dtype=torch.float64),
        )
        x, local = placed(whole, layout)
        local.requires_grad_(asked != "parameters")
        whole.requires_grad_(asked != "parameters")
        p_true = [
            torch.rand(8, dtype=torch.float64).requires_grad_(asked != "input")
            for _ in range(2)
        ]
        p = [t.detach().clone().requires_grad_(asked != "input") for t in p_true]
        y, y_true = (
            hetconv.gather(F.group_norm(x, 2, *p)),
            F.group_norm(whole, 2, *p_true),
        )
        y.backward(g), y_true.backward(g)
        found |= {
            f"output, {asked}": apart(y, y_true),
            f"x, {asked}": apart(full_gradient(local, layout), whole.grad),
        }
        found |= {
            f"parameter {i}, {asked}": apart(a.grad, b.grad)
            for i, (a, b) in enumerate(zip(p, p_true, strict=True))
        }
    if (
        len(shape) == 2
    ):  # where a part has one number per group, which torch refuses of the whole
        found["single numbers"] = apart(
            hetconv.gather(F.group_norm(x, 8)), F.group_norm(whole, 8)
        )
    else:
        y, y_true = (
            hetconv.gather(F.local_response_norm(x, 3, 0.5)),
            F.local_response_norm(whole, 3, 0.5),
        )
        found["local response"] = apart(y, y_true)
    return found


@pytest.mark.parametrize("cut", CUTS)
def test_other_than_images(cut: str) -> None:
    assert_same(on_ranks(3, of_any_rank, cut))


def given_parameters_on_parts() -> Differences:
    """Weights that were computed on parts themselves."""
    image, numbers = (
        Layout.sharded((3, 8, 6, 5), 2, (4, 0, 2)),
        torch.rand(8, dtype=torch.float64),
    )
    whole, last = (
        torch.rand(image.shape, dtype=torch.float64),
        torch.rand(5, dtype=torch.float64),
    )
    found = {}
    for name, norm, start, cut in (
        ("group", lambda x, w: F.group_norm(x, 2, w, w), numbers, (5, 2, 1)),
        ("layer", lambda x, w: F.layer_norm(x, (5,), w), last, (2, 0, 3)),
    ):
        layout = Layout.sharded(start.shape, 0, cut)
        (x, _), (w, w_local), w_true = (
            placed(whole, image),
            placed(start, layout),
            start.clone().requires_grad_(),
        )
        y, y_true = hetconv.gather(norm(x, w)), norm(whole, w_true)
        g = torch.rand_like(y_true)
        y.backward(g), y_true.backward(g)
        found |= {
            name: apart(y, y_true),
            f"{name} gradient": apart(full_gradient(w_local, layout), w_true.grad),
        }
    return found


def test_parameters_may_lie_on_parts_themselves() -> None:
    assert_same(on_ranks(3, given_parameters_on_parts))


NETS: dict[str, Callable[[], nn.Module]] = {
    "decoder": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Conv2d(8, 4, 3, padding=1),
    ),
    "styles": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.InstanceNorm2d(8, affine=True),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 6, 3, padding=1),
        nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        nn.GELU(),
        nn.LayerNorm(8),
        nn.RMSNorm((9, 8)),
        nn.LocalResponseNorm(3),
        nn.Conv2d(6, 4, 1),
    ),
}
CUT_KINDS: tuple[SplitKind, ...] = ("height", "width", "sample", "filter", "channel")
SHAPE_IN = (4, 3, 9, 8)


def trained(net: str, kind: SplitKind, ratio: tuple[int, ...]) -> Differences:
    # Adam would make steps of the rounding that is left of a bias's gradient where a
    # norm of instances follows.
    optimizer = {"decoder": "adam", "styles": "sgd"}[net]
    return train(
        NETS[net],
        splits_of(NETS[net](), (kind,), ratio),
        SHAPE_IN,
        len(ratio),
        optimizer,
        2,
    )


@pytest.mark.parametrize("ratio", [(3, 1), (5, 2, 1), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize("kind", CUT_KINDS)
@pytest.mark.parametrize("net", NETS)
def test_training_with_norms(net: str, kind: SplitKind, ratio: tuple[int, ...]) -> None:
    assert_same(on_ranks(len(ratio), trained, net, kind, ratio))


def sent_and_predicted(
    net: str, kind: SplitKind, weights: tuple[int, ...], training: bool
) -> tuple[Any, Any]:
    """Bytes to every other rank in one step: as counted, and as the plan says."""
    model = NETS[net]().train(training)
    x, world = torch.randn(SHAPE_IN, requires_grad=training), len(weights)
    splits = splits_of(model, (kind,), weights)
    with torch.set_grad_enabled(training):
        graph = hetconv.capture(model, x)
        profile = ClusterProfile.from_devices(["cpu"] * world, link="host")
        predicted, _ = estimate(
            graph, profile, splits, "train" if training else "infer"
        )
        model = hetconv.parallelize(model, plan_of(model, splits, world))
        with hetconv.count_sent() as sent:
            y = model(x)
            if training:
                loss_of(y).backward()
    return dict(sent), {
        r: size for r, size in enumerate(predicted.sent_bytes[dist.get_rank()]) if size
    }


@pytest.mark.parametrize("weights", [(3, 1), (5, 2, 1), (1, 0, 2)])
@pytest.mark.parametrize("kind", CUT_KINDS)
@pytest.mark.parametrize("net", NETS)
def test_predicted_bytes_are_sent_bytes(
    net: str, kind: SplitKind, weights: tuple[int, ...]
) -> None:
    for training in (True, False):
        for sent, predicted in on_ranks(
            len(weights), sent_and_predicted, net, kind, weights, training
        ):
            assert sent == predicted, training


def test_group_norm_reads_its_input_twice() -> None:
    seconds, profile = [], ClusterProfile.from_devices(["cpu"])
    for norm in (nn.GroupNorm(2, 8), nn.LayerNorm(5)):
        graph = hetconv.capture(norm, torch.randn(4, 8, 6, 5))
        seconds.append(
            estimate(graph, profile, {}, "infer")[0].step_s
            - profile.devices[0].overhead_s
        )
    assert seconds[0] == pytest.approx(2 * seconds[1])


def test_a_decoder_by_height_gathers_nothing() -> None:
    graph = hetconv.capture(NETS["decoder"](), torch.randn(SHAPE_IN))
    assert not [node for node in graph.nodes if isinstance(node.op, Gather)]
    (norm,) = (node.op for node in graph.nodes if isinstance(node.op, GroupNorm))
    sharding = norm.sharding((Layout.sharded(norm.shape, 2, (6, 3)),))
    assert (
        sharding.input_layouts[0]
        == sharding.output
        == Layout.sharded(norm.shape, 2, (6, 3))
    )


def evaluated(kind: SplitKind, fuse: bool) -> Differences:
    """Running statistics of instances in evaluation, also folded into the convolution
    before them.
    """
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU()).double()
    x = torch.randn(SHAPE_IN, dtype=torch.float64)
    model(x)
    model.eval()
    with torch.no_grad():
        expected = model(x)
        following = {"0": ("instance_norm", "relu")}
        cut = hetconv.parallelize(
            model,
            plan_of(model, splits_of(model, (kind,), (2, 0, 1)), 3, following),
            fuse=fuse,
        )
        return {"output": apart(cut(x), expected)}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("kind", ["height", "filter"])
def test_instance_norm_in_evaluation(kind: SplitKind, fuse: bool) -> None:
    assert_same(on_ranks(3, evaluated, kind, fuse))
