"""parallelize and HetConv2d: what a model gives on several ranks is what it gives on one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv.errors import HetConvError, PlanError
from hetconv.nn.layers import HetConv2d, HetLinear
from hetconv.sharding.split import Split, SplitKind
from tests.equivalence import (
    Differences,
    apart,
    assert_same,
    loss_of,
    one_step,
    pair,
    same_state,
)
from tests.nets import (
    IMAGE_KINDS,
    Chain,
    MobileBlock,
    ResNet,
    SuperResolution,
    Twice,
    plan_of,
    splits_of,
)
from tests.spawn import on_ranks


def standalone(
    kind: SplitKind, ratio: tuple[int, ...], output: str, options: dict[str, Any]
) -> Differences:
    torch.set_default_dtype(torch.float64)
    plain = nn.Conv2d(6, 8, 3, **options)
    sizes = {
        "replicate": (),
        "filter": tuple(4 * r for r in ratio),
        "channel": tuple(3 * r for r in ratio),
    }
    cut = HetConv2d.from_conv(plain, Split(kind, sizes.get(kind, ratio)), output=output)  # type: ignore[arg-type]
    cut.register_forward_hook(lambda _, args, y: hetconv.gather(y))
    return one_step(plain, cut, torch.randn(3, 6, 9, 8))


@pytest.mark.parametrize("output", ["replicated", "split"])
@pytest.mark.parametrize("kind", IMAGE_KINDS)
@pytest.mark.parametrize("ratio", [(1, 1), (2, 0)])
def test_a_convolution_by_itself(
    ratio: tuple[int, ...], kind: SplitKind, output: str
) -> None:
    assert_same(
        on_ranks(2, standalone, kind, ratio, output, {"stride": 2, "padding": 1})
    )


def cut_chain(
    kind: SplitKind = "filter", ratio: tuple[int, ...] = (2, 1)
) -> tuple[nn.Module, nn.Module]:
    return pair(Chain, splits_of(Chain(), (kind,), ratio), len(ratio))


def state_round_trip() -> tuple[bool, Differences]:
    serial, cut = cut_chain()
    kept = hetconv.full_state_dict(cut)
    with torch.no_grad():
        for p in cut.parameters():
            p.zero_()
    lost = any(v > 0 for v in same_state(serial, cut).values())
    hetconv.load_full_state_dict(cut, kept)
    return lost, same_state(serial, cut) | one_step(
        serial, cut, torch.randn(2, 4, 16, 16)
    )


def test_the_full_state_brings_everything_back() -> None:
    found = on_ranks(2, state_round_trip)
    assert all(lost for lost, _ in found)
    assert_same([differences for _, differences in found])


def state_of_the_serial_model() -> Differences:
    _, cut = cut_chain("channel")
    other = Chain()
    hetconv.load_full_state_dict(cut, other.state_dict())
    return same_state(other, cut)


def test_the_state_of_the_unsplit_model_is_loaded() -> None:
    assert_same(on_ranks(2, state_of_the_serial_model))


def refused_states() -> tuple[list[str], Differences]:
    serial, cut = cut_chain()
    state = hetconv.full_state_dict(cut)
    wrong = (
        {k: torch.zeros_like(v) for k, v in state.items() if k != "two.bias"},
        {k: torch.zeros_like(v) for k, v in state.items()} | {"more": torch.zeros(1)},
        {k: torch.zeros_like(v) for k, v in state.items()}
        | {"one.weight": torch.zeros(4, 4, 3, 3)},
        dict(cut.state_dict()),
    )
    said = []
    for bad in wrong:
        try:
            hetconv.load_full_state_dict(cut, bad)
        except HetConvError as e:
            said.append(str(e))
    return said, same_state(serial, cut)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    found = on_ranks(2, refused_states)
    missing, unknown, shape, local = found[0][0]
    assert "missing ['two.bias']" in missing
    assert "unknown ['more']" in unknown
    assert "one.weight: (4, 4, 3, 3), expected (8, 4, 3, 3)" in shape
    assert "one.weight: " in local
    assert_same([differences for _, differences in found])


def without_gradients() -> tuple[bool, float]:
    serial, cut = cut_chain("height")
    serial.eval(), cut.eval()
    x = torch.randn(2, 4, 16, 16)
    with torch.no_grad():
        y = cut(x)
        return type(y) is Tensor and not y.requires_grad, apart(y, serial(x))


def test_inference_without_gradients() -> None:
    for plain, difference in on_ranks(2, without_gradients):
        assert plain
        assert difference <= 1e-10


def in_inference_mode() -> float:
    serial, cut = cut_chain("width")
    x = torch.randn(2, 4, 16, 16)
    with torch.inference_mode():
        return apart(cut(x), serial(x))


def test_inference_mode() -> None:
    assert max(on_ranks(2, in_inference_mode)) <= 1e-10


def accumulated(kind: SplitKind) -> Differences:
    serial, cut = cut_chain(kind)
    one_step(serial, cut, torch.randn(2, 4, 16, 16))
    return one_step(serial, cut, torch.randn(1, 4, 16, 16))


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_gradients_accumulate(kind: SplitKind) -> None:
    assert_same(on_ranks(2, accumulated, kind))


def gradients_of_some(kind: SplitKind) -> Differences:
    """What `torch.autograd.grad` gives for a few tensors, the others left alone."""
    serial, cut = cut_chain(kind)
    x = torch.randn(2, 4, 16, 16)
    wanted = [(m, [m.two.bias, m.head.bias, m.one.bias]) for m in (serial, cut)]
    expected, found = (
        torch.autograd.grad(loss_of(m(x)), params) for m, params in wanted
    )
    boxes = [
        layer.held["bias"].boxes[torch.distributed.get_rank()]
        for layer in (cut.two, cut.head, cut.one)
    ]
    slices = [tuple(map(slice, box.lo, box.hi)) for box in boxes]
    return {
        str(i): apart(a, b[own])
        for i, (a, b, own) in enumerate(zip(found, expected, slices, strict=True))
    }


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_gradients_of_a_few_parameters(kind: SplitKind) -> None:
    assert_same(on_ranks(2, gradients_of_some, kind))


def copied() -> tuple[Differences, bool]:
    serial, cut = cut_chain()
    twin = copy.deepcopy(cut)
    found = one_step(serial, twin, torch.randn(2, 4, 16, 16))
    return found, all(p.grad is None for p in cut.parameters())


def test_a_copy_of_a_parallelized_model_is_one_of_its_own() -> None:
    found = on_ranks(2, copied)
    assert_same([differences for differences, _ in found])
    assert all(alone for _, alone in found)


def names_and_swaps() -> tuple[bool, bool, bool, bool]:
    torch.manual_seed(0)
    plain = ResNet()
    plain.stem.register_forward_hook(
        lambda module, args, kwargs, y: y * 2, with_kwargs=True
    )
    plain.stem.weight.data = plain.stem.weight.data.to(
        memory_format=torch.channels_last
    )
    cut = copy.deepcopy(plain)
    same = (
        hetconv.parallelize(cut, plan_of(cut, splits_of(cut, ("filter",), (3, 1)), 2))
        is cut
    )
    names = [n for n, _ in cut.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    x = torch.randn(1, 3, 20, 20)
    hooked = apart(cut.eval()(x), plain.eval()(x)) < 1e-5
    kept = cut.stem.weight.is_contiguous(memory_format=torch.channels_last)
    return (
        same,
        names,
        hooked,
        kept and isinstance(cut.stem, HetConv2d) and isinstance(cut.head, HetLinear),
    )


def test_a_model_keeps_its_identity_names_hooks_and_memory_format() -> None:
    assert on_ranks(2, names_and_swaps) == [(True,) * 4] * 2


def weights_of_rank_0() -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(torch.distributed.get_rank())
    model, conv = MobileBlock(), nn.Conv2d(4, 4, 3)
    cut = hetconv.parallelize(
        copy.deepcopy(model), plan_of(model, splits_of(model, ("height",), (1, 1)), 2)
    )
    by_itself = HetConv2d.from_conv(conv, Split("width", (1, 1)))
    made = HetConv2d(4, 4, 3, split=Split("width", (1, 1)))
    found = [
        p.detach()
        for m in (cut, by_itself, made)
        for p in (*m.parameters(), *m.buffers())
    ]
    return found, [
        p.detach() for m in (model, conv) for p in (*m.parameters(), *m.buffers())
    ]


def test_weights_are_those_of_rank_0() -> None:
    (mine, truth), (others, _) = on_ranks(2, weights_of_rank_0)
    assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))
    assert all(
        torch.equal(a, b) for a, b in zip(mine[: len(truth)], truth, strict=True)
    )


def a_whole_model_of_one_layer() -> Differences:
    torch.set_default_dtype(torch.float64)
    plain = nn.Conv2d(3, 4, 3)
    cut = copy.deepcopy(plain)
    cut = hetconv.parallelize(cut, plan_of(cut, {"": Split("filter", (3, 1))}, 2))
    return one_step(plain, cut, torch.randn(1, 3, 6, 6))


def test_a_model_that_is_one_convolution() -> None:
    assert_same(on_ranks(2, a_whole_model_of_one_layer))


def sits_within_a_group() -> Differences | None:
    group = torch.distributed.new_group([2, 0])
    if torch.distributed.get_rank() == 1:
        return None
    torch.set_default_dtype(torch.float64)
    plain = SuperResolution()
    cut = copy.deepcopy(plain)
    cut = hetconv.parallelize(
        cut, plan_of(cut, splits_of(cut, ("height",), (3, 1)), 2), group=group
    )
    return one_step(plain, cut, torch.randn(1, 3, 9, 9))


def test_a_model_on_some_of_the_ranks() -> None:
    first, none, last = on_ranks(3, sits_within_a_group)
    assert none is None
    assert_same([first, last])


class Standardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight / self.weight.norm(), self.bias)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


def refusals() -> list[str]:
    half = Split("filter", (2, 2))
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)))
    said = []
    for model, plan in (
        (nn.Sequential(Standardized(4, 4, 3)), {"0": half}),
        (normed, {"0": half}),
        (Tied(), {"two": half}),
        (Twice(), {"conv": half, "again": Split("filter", (3, 1))}),
        (nn.Sequential(nn.Conv2d(4, 4, 3), nn.LazyBatchNorm2d()), {"0": half}),
    ):
        layers = {
            n: plan_of(nn.Sequential(nn.Conv2d(4, 4, 3)), {"0": s}, 2).layers["0"]
            for n, s in plan.items()
        }
        bare = plan_of(nn.Sequential(), {}, 2)
        try:
            hetconv.parallelize(
                model, type(bare)(bare.devices, "train", "", (), layers, "by hand")
            )
        except PlanError as e:
            said.append(str(e))
    return said


def test_layers_with_weights_of_their_own_kind_or_of_no_shape_are_refused() -> None:
    standardized, normed, tied, twice, lazy = on_ranks(2, refusals)[0]
    assert "'0' is a Standardized" in standardized
    assert "'0' is a ParametrizedConv2d" in normed
    assert "'two' shares a parameter" in tied
    assert "'conv'" in twice
    assert "'again'" in twice
    assert "'1' is a LazyBatchNorm2d" in lazy
    assert "call the model once" in lazy


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout2d(
            F.dropout(self.conv(x), 0.3, self.training), 0.3, self.training
        )


def drawn(kind: SplitKind) -> Tensor:
    torch.manual_seed(torch.distributed.get_rank())
    model = Dropping()
    cut = hetconv.parallelize(
        model, plan_of(model, splits_of(model, (kind,), (2, 1, 1)), 3)
    )
    return cut(torch.ones(2, 3, 6, 6)).detach()


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_random_operators_draw_alike_on_every_rank(kind: SplitKind) -> None:
    first, *others = on_ranks(3, drawn, kind)
    assert (first == 0).any()
    assert all(torch.equal(first, other) for other in others)
