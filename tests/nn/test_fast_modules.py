"""Norms and activations of torch's own run on local shards without being read as calls,
and as they would otherwise.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetconv
from hetconv.nn.fast_modules import ELEMENTWISE, LocalForward, use_local_forwards
from hetconv.ops import call_cache
from hetconv.sharding.split import SplitKind
from tests.equivalence import Differences, assert_same, one_step, pair, same_state
from tests.nets import splits_of
from tests.placed import PLACEMENTS, WORLD, on_parts, placed
from tests.spawn import on_ranks


def norm(**options: Any) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(8, **options).double()
    with torch.no_grad():
        for t in (*made.parameters(), *made.buffers()):
            if t.is_floating_point():
                t.copy_(torch.linspace(0.5, 2, 8))
    return made


def frozen() -> nn.Module:
    return norm().eval().requires_grad_(False)


MODULES = {
    "batch norm in evaluation": lambda: norm().eval(),
    "batch norm, frozen": frozen,
    "batch norm in training": lambda: norm(),
    "batch norm in training, of all batches alike": lambda: norm(momentum=None),
    "batch norm in training without running statistics": lambda: norm(
        track_running_stats=False
    ),
    "batch norm without running statistics": lambda: norm(
        track_running_stats=False
    ).eval(),
    "batch norm without parameters": lambda: norm(affine=False).eval(),
    "batch norm and ReLU": lambda: nn.Sequential(frozen(), nn.ReLU()),
    "ReLU in place": lambda: nn.Sequential(nn.Softplus(), nn.ReLU(inplace=True)),
    **{kind.__name__: kind for kind in ELEMENTWISE},
}


def ready(name: str) -> nn.Module:
    module = nn.Sequential(MODULES[name]())
    use_local_forwards(module)
    return module


def no_function(*_: Any) -> Any:
    raise AssertionError


def as_modules(name: str) -> dict[str, Differences]:
    return {
        place: on_parts(no_function, place, module=ready(name)) for place in PLACEMENTS
    }


@pytest.mark.parametrize("name", MODULES)
def test_modules_give_what_they_give_on_one_device(name: str) -> None:
    for found in on_ranks(WORLD, as_modules, name):
        assert_same(list(found.values()))


def dispatched(name: str, placement: str) -> list[str]:
    """The torch functions of a module that were looked at, of which some may be remembered."""
    layout, seen, module = PLACEMENTS[placement], [], ready(name)
    x, _ = placed(torch.ones(layout.shape, dtype=torch.float64), layout)
    again = call_cache.lookup

    def watching(func: Any, *args: Any) -> Any:
        seen.append(func.__name__)
        return again(func, *args)

    call_cache.lookup = watching  # type: ignore[assignment]
    try:
        with torch.no_grad():
            hetconv.gather(module(x))
    finally:
        call_cache.lookup = again
    return seen


@pytest.mark.parametrize(
    ("name", "placement", "expected"),
    [
        ("batch norm and ReLU", "rows", []),
        ("batch norm in evaluation", "rows", []),
        ("GELU", "channels", []),
        ("batch norm in evaluation", "channels", []),
        ("batch norm in training", "channels", []),
        ("batch norm in training", "partial", []),
        ("batch norm in training", "partial, wanted whole", []),
        ("GELU", "partial", []),
        ("batch norm in training", "rows", ["batch_norm"]),
        ("batch norm without running statistics", "rows", ["batch_norm"]),
        ("ReLU in place", "rows", ["relu"]),
    ],
)
def test_only_what_needs_nothing_of_others_skips_the_dispatch(
    name: str, placement: str, expected: list[str]
) -> None:
    assert all(
        seen == expected for seen in on_ranks(WORLD, dispatched, name, placement)
    )


def one_rank(kind: SplitKind) -> tuple[Differences, list[str]]:
    """A step and its running statistics, and the functions that were dispatched."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm(), nn.ReLU())

    serial, cut = pair(make, splits_of(make(), (kind,), (1,)), 1)
    seen: list[str] = []
    again = call_cache.lookup

    def watching(func: Any, *args: Any) -> Any:
        seen.append(func.__name__)
        return again(func, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_cache, "lookup", watching)
        found = one_step(serial, cut, torch.randn(2, 3, 5, 4))
    return found | same_state(serial, cut), seen


@pytest.mark.parametrize("kind", ["sample", "height", "filter"])
def test_one_rank_normalizes_in_training_what_it_has(kind: SplitKind) -> None:
    ((found, seen),) = on_ranks(1, one_rank, kind)
    assert_same([found])
    assert seen == []


def refused(norm: nn.Module, placement: str) -> bool:
    layout, module = PLACEMENTS[placement], nn.Sequential(norm.double().eval())
    use_local_forwards(module)
    x, _ = placed(torch.ones(layout.shape, dtype=torch.float64), layout)
    with (
        torch.no_grad(),
        pytest.raises((hetconv.HetConvError, RuntimeError, ValueError)),
    ):
        module(x)
    return True


@pytest.mark.parametrize("placement", ["rows", "channels"])
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(4), nn.BatchNorm3d(8)], ids=["channels", "dimensions"]
)
def test_a_norm_refuses_parts_of_what_it_is_not_for(
    norm: nn.Module, placement: str
) -> None:
    """Of eight channels, of which no rank may have more than four, and of images."""
    assert all(on_ranks(WORLD, refused, norm, placement))


def test_a_copy_runs_its_own_module() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2).eval())
    use_local_forwards(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.fill_(3)
        x = torch.ones(1, 2, 1, 1)
        assert not torch.equal(twin(x), model(x))
    assert isinstance(twin[0].forward, LocalForward)


class Louder(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_modules_of_others_are_left_alone() -> None:
    patched = nn.ReLU()
    patched.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.Sequential(Louder(), patched, nn.ReLU(inplace=True), nn.Dropout())
    before = [vars(m).get("forward") for m in model]
    use_local_forwards(model)
    assert [vars(m).get("forward") for m in model] == before
