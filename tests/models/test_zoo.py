"""Small models of torchvision and timm, as they are: planned, cut along filters or as
the plan says, and trained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetconv
from bench.planner import modelled
from hetconv.schemas.plan import Plan
from tests.equivalence import (
    Differences,
    apart,
    assert_same,
    from_rank_0,
    full_gradients,
    leaves,
)
from tests.nets import plan_of, splits_of
from tests.spawn import on_ranks

SIZE = 64
TORCHVISION = (
    "alexnet",
    "vgg11_bn",
    "mobilenet_v3_small",
    "googlenet",
    "resnet18",
    "squeezenet1_1",
    "shufflenet_v2_x0_5",
)
# Beside them, by how they keep tables, grids and masks that depend on the size: the
# side of their images.
TIMM = {
    "convit_tiny": 224,
    "shvit_s1": 64,
    "efficientformer_l1": 224,
    "levit_128s": 224,
    "tiny_vit_5m_224": 224,
    "efficientvit_m0": 224,
}
ZOO = (*TORCHVISION, *TIMM)


def made(name: str) -> nn.Module:
    """A model without dropout, of which each run would draw other masks."""
    torch.manual_seed(0)
    if name in TIMM:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=10)
    else:
        import torchvision

        more: dict[str, Any] = (
            {"init_weights": True, "aux_logits": True} if name == "googlenet" else {}
        )
        with slim_classifiers():
            model = getattr(torchvision.models, name)(num_classes=10, **more)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@contextmanager
def slim_classifiers() -> Iterator[None]:
    """Linear layers of 64 features where AlexNet and VGG have 4096, which take most of the time."""
    linear = nn.Linear

    class Slim(linear):  # type: ignore[misc, valid-type]
        def __init__(self, features: int, out: int, *args: Any, **options: Any) -> None:
            super().__init__(
                64 if features == 4096 else features,
                64 if out == 4096 else out,
                *args,
                **options,
            )
            self.__class__ = linear

    nn.Linear = Slim  # type: ignore[misc]
    try:
        yield
    finally:
        nn.Linear = linear  # type: ignore[misc]


def image(name: str) -> Tensor:
    return torch.randn(2, 3, *(TIMM.get(name, SIZE),) * 2)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


@cache
@from_rank_0
def planned(name: str) -> Plan:
    """The planner's own plan, of a model that is as before and gives what it gave before."""
    model, x = made(name).eval(), image(name)
    before, state = model(x), state_of(model)
    plan = hetconv.make_plan(hetconv.capture(model, x), modelled(2))
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(
        torch.equal(a, b) for a, b in zip(leaves(model(x)), leaves(before), strict=True)
    )
    return plan


def by_filters(name: str) -> Plan:
    model = made(name)
    return plan_of(model, splits_of(model, ("filter",), (5, 3)), 2)


HOW: dict[str, Callable[[str], Plan]] = {"planned": planned, "filters": by_filters}


def differences(name: str, how: str, training: bool) -> Differences:
    plan = HOW[how](name)
    torch.set_default_dtype(torch.float64)
    plain = made(name).train(training)
    cut = hetconv.parallelize(copy.deepcopy(plain), plan)
    x = image(name)
    if not training:
        with torch.no_grad():
            return {
                f"output {i}": apart(a, b)
                for i, (a, b) in enumerate(
                    zip(leaves(cut(x)), leaves(plain(x)), strict=True)
                )
            }
    for model in (plain, cut):
        sum(y.square().mean() for y in leaves(model(x))).backward()  # type: ignore[union-attr]
    gradients = full_gradients(cut)
    found = {
        k: apart(gradients[k], p.grad)
        for k, p in plain.named_parameters()
        if p.grad is not None
    }
    state, expected = hetconv.full_state_dict(cut), plain.state_dict()
    return found | {
        f"state {k}": apart(state[k], expected[k]) for k in expected if "running" in k
    }


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision(name: str, how: str, training: bool) -> None:
    assert_same(on_ranks(2, differences, name, how, training))


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str) -> None:
    assert_same(on_ranks(2, differences, name, "planned", False))
