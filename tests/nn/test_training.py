"""What people do around training: checkpoints, hooks, own functions, averages, frozen
and shared parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import hetconv
from hetconv.sharding.split import SplitKind
from tests.equivalence import (
    Differences,
    apart,
    assert_same,
    full_gradients,
    loss_of,
    one_step,
    pair,
    same_state,
)
from tests.nets import IMAGE_KINDS, ResNet, plan_of, splits_of
from tests.spawn import on_ranks

SHAPE = (2, 3, 20, 20)
RATIO = (2, 0, 1)


def both(make: Callable[[], nn.Module], kind: SplitKind) -> tuple[nn.Module, nn.Module]:
    return pair(make, splits_of(make(), (kind,), RATIO), len(RATIO))


def prefixed(name: object, found: Differences) -> Differences:
    return {f"{name} {k}": v for k, v in found.items()}


class Pools(nn.Module):
    """Regions that end in what an empty part does not compute, each computed again in backward."""

    def __init__(self, upsamples: bool) -> None:
        super().__init__()
        self.upsamples = upsamples
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.scale = (
            nn.BatchNorm2d(4),
            nn.Parameter(torch.full((4, 1, 1), 0.7)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y = checkpoint(
            lambda t: F.max_pool2d(self.scale * F.relu(self.b(t)), 3, 2, 1),
            y,
            use_reentrant=False,
        )
        y = checkpoint(
            lambda t: F.avg_pool2d(self.norm(t), 3, 2, 1), y, use_reentrant=False
        )
        return (
            y
            if not self.upsamples
            else checkpoint(
                lambda t: F.interpolate(self.norm(self.b(t)), scale_factor=2.0),
                y,
                use_reentrant=False,
            )
        )


def with_checkpoints(kind: SplitKind, upsamples: bool) -> Differences:
    serial, cut = both(partial(Pools, upsamples), kind)
    return one_step(serial, cut, torch.randn(2, 3, 8, 8)) | same_state(serial, cut)


@pytest.mark.parametrize("upsamples", [False, True])
@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_regions_computed_again_in_backward(kind: SplitKind, upsamples: bool) -> None:
    assert_same(on_ranks(3, with_checkpoints, kind, upsamples))


def checkpointed_whole(kind: SplitKind, reentrant: bool) -> Differences:
    """Around the whole model, where replicas are also compared every two steps."""
    torch.set_default_dtype(torch.float64)
    serial = ResNet()
    cut = ResNet()
    cut.load_state_dict(serial.state_dict())
    cut = hetconv.parallelize(
        cut, plan_of(cut, splits_of(cut, (kind,), RATIO), 3), sync_every=2
    )
    found: Differences = {}
    for i in range(3):
        x = torch.randn(SHAPE, requires_grad=True)
        for model in (serial, cut):
            loss_of(checkpoint(model, x, use_reentrant=reentrant)).backward()
        gradients = full_gradients(cut)
        found |= {
            f"{i} gradient {k}": apart(gradients[k], p.grad)
            for k, p in serial.named_parameters()
        }
    return found | same_state(serial, cut)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["filter", "height"])
def test_a_whole_model_computed_again_in_backward(
    kind: SplitKind, reentrant: bool
) -> None:
    assert_same(on_ranks(3, checkpointed_whole, kind, reentrant))


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (s + x * s * (1 - s))


class Negate(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.neg_()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = Swish.apply(self.a(x))
        y = checkpoint(lambda t: hetconv.gather(self.b(t)), y, use_reentrant=True)
        z = self.a(x) + 1
        Negate.apply(z)
        return self.b(y) * z


def with_functions(kind: SplitKind) -> Differences:
    serial, cut = both(Functions, kind)
    return one_step(serial, cut, torch.randn(SHAPE))


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_autograd_functions_of_a_users_own(kind: SplitKind) -> None:
    assert_same(on_ranks(3, with_functions, kind))


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda t: F.relu(self.b(t)), self.a(x), use_reentrant=True)


def reentrant() -> str:
    _, cut = both(Reentrant, "height")
    with pytest.raises(hetconv.HetConvError) as error:
        cut(torch.randn(SHAPE))
    return str(error.value)


def test_a_function_that_would_lose_a_gradient_is_refused() -> None:
    for said in on_ranks(3, reentrant):
        assert "CheckpointFunction" in said
        assert "use_reentrant=False" in said


def hooked(kind: SplitKind) -> Differences:
    """What hooks of modules see, forward and backward, and what comes of a gradient
    that one of them changes.
    """
    serial, cut = both(ResNet, kind)
    seen: list[list[Tensor]] = [[], []]
    for model, own in zip((serial, cut), seen, strict=True):
        for path in ("stem", "bn", "blocks.0", "blocks.1.down.0", "pool", "head"):
            module = model.get_submodule(path)
            module.register_forward_hook(
                lambda _, args, y, own=own: own.extend(map(hetconv.gather, (*args, y)))
            )
            module.register_full_backward_pre_hook(
                lambda _, out, own=own: own.extend(out)
            )
            module.register_full_backward_hook(
                lambda _, into, out, own=own: own.extend(
                    g for g in into if g is not None
                )
            )
        model.get_submodule("blocks.0").register_full_backward_hook(
            lambda _, into, out: (into[0] * 2,)
        )
    found = one_step(serial, cut, torch.randn(SHAPE))
    return found | {
        f"seen {i}": apart(b.detach(), a.detach())
        for i, (a, b) in enumerate(zip(*seen, strict=True))
    }


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_hooks_of_modules_see_whole_tensors(kind: SplitKind) -> None:
    found = on_ranks(3, hooked, kind)
    assert sum(k.startswith("seen") for k in found[0]) >= 20
    assert_same(found)


def averaged(kind: SplitKind) -> Differences:
    serial, cut = both(ResNet, kind)
    means = [
        AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        for m in (serial, cut)
    ]
    updates = [torch.optim.SGD(m.parameters(), 0.1) for m in (serial, cut)]
    for _ in range(3):
        for update in updates:
            update.zero_grad()
        one_step(serial, cut, torch.randn(SHAPE))
        for update, mean, model in zip(updates, means, (serial, cut), strict=True):
            update.step()
            mean.update_parameters(model)
    found = same_state(*means) | prefixed("model", same_state(serial, cut))
    for mean in means:
        mean.eval()
    x = torch.randn(SHAPE)
    with torch.no_grad():
        found["output"] = apart(means[1](x), means[0](x))
    hetconv.load_full_state_dict(means[1], hetconv.full_state_dict(means[1]))
    return found | prefixed("again", same_state(*means))


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_a_moving_average_of_a_model(kind: SplitKind) -> None:
    assert_same(on_ranks(3, averaged, kind))


def toggled(kind: SplitKind) -> Differences:
    """Other stages are frozen at each step; evaluation without gradients lies between steps."""
    serial, cut = both(ResNet, kind)
    frozen: tuple[tuple[str, ...], ...] = (
        (),
        ("stem", "bn"),
        ("blocks",),
        ("stem", "bn", "blocks"),
        (),
    )
    found: Differences = {}
    for i, names in enumerate(frozen):
        for model in (serial, cut):
            model.train().zero_grad()
            model.requires_grad_(True)
            for name in names:
                model.get_submodule(name).requires_grad_(False)
        found |= prefixed(i, one_step(serial, cut, torch.randn(SHAPE)))
        x = torch.randn(SHAPE)
        for how in (torch.no_grad, torch.inference_mode):
            with how():
                found[f"{i} {how.__name__}"] = apart(cut.eval()(x), serial.eval()(x))
    return found | same_state(serial, cut)


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_stages_frozen_in_turn(kind: SplitKind) -> None:
    assert_same(on_ranks(3, toggled, kind))


class Sharing(nn.Module):
    """A layer under two names, called twice; a norm's weight and a plain convolution's
    in two layers each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.d = (
            nn.Conv2d(3, 3, 3, padding=1),
            nn.Conv2d(3, 3, 1),
            nn.Conv2d(3, 3, 1),
        )
        self.b, self.norm, self.other = self.a, nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.other.weight, self.d.weight = self.norm.weight, self.c.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.other(self.b(F.relu(self.norm(self.a(x)))))))


def shared(kind: SplitKind) -> Differences:
    splits = {"a": splits_of(nn.Sequential(nn.Conv2d(3, 3, 3)), (kind,), RATIO)["0"]}
    serial, cut = pair(Sharing, splits, 3)
    updates = [torch.optim.SGD(m.parameters(), 0.1) for m in (serial, cut)]
    found = one_step(serial, cut, torch.randn(SHAPE))
    for update in updates:
        update.step()
    return found | same_state(serial, cut)


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_shared_layers_and_parameters(kind: SplitKind) -> None:
    assert_same(on_ranks(3, shared, kind))


def averaged_gradients(kind: SplitKind) -> Differences:
    """Micro-batches that add up to an optimizer's step, clipped by norm."""
    serial, cut = both(ResNet, kind)
    updates = [
        torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (serial, cut)
    ]
    found: Differences = {}
    for step in range(2):
        for update in updates:
            update.zero_grad(set_to_none=step == 0)
        for size in (2, 3, 1):
            found |= prefixed(
                f"{step} {size}", one_step(serial, cut, torch.randn(size, 3, 20, 20))
            )
        norm = nn.utils.clip_grad_norm_(serial.parameters(), 0.5)
        found[f"{step} norm"] = apart(norm, hetconv.clip_grad_norm_(cut, 0.5))
        for update in updates:
            update.step()
    return found | same_state(serial, cut)


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_micro_batches_add_up(kind: SplitKind) -> None:
    assert_same(on_ranks(3, averaged_gradients, kind))
