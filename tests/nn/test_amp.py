"""Half precision by autocast with loss scaling, and images that stay channels-last from
the input to the output.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv.errors import PlanError
from hetconv.runtime.het_tensor import HetTensor
from hetconv.sharding.split import SplitKind
from tests.equivalence import (
    Differences,
    apart,
    assert_same,
    full_gradients,
    loss_of,
    pair,
)
from tests.nets import IMAGE_KINDS, NETS, ResNet, plan_of, splits_of
from tests.spawn import on_ranks

RATIO = (2, 0, 1)


def scaled_training(
    kind: SplitKind, dtype: torch.dtype
) -> tuple[float, float, list[float]]:
    """Errors of a serial and a split model after steps in half precision, against
    float32; and their loss scales.
    """
    torch.manual_seed(0)
    truth = ResNet()
    serial, cut = copy.deepcopy(truth), copy.deepcopy(truth)
    cut = hetconv.parallelize(cut, plan_of(cut, splits_of(cut, (kind,), RATIO), 3))
    models = (truth, serial, cut)
    updates = [torch.optim.SGD(m.parameters(), 0.02) for m in models]
    scalers = [
        torch.amp.GradScaler("cpu", enabled=False),
        torch.amp.GradScaler("cpu", init_scale=2.0**9),
    ]
    scalers.append(hetconv.GradScaler(cut, "cpu", init_scale=2.0**9))
    for _ in range(3):
        x = torch.randn(3, 3, 24, 24)
        for model, update, scaler in zip(models, updates, scalers, strict=True):
            update.zero_grad()
            with torch.autocast("cpu", dtype, enabled=model is not truth):
                y = model(x)
            assert model is truth or y.dtype == dtype
            scaler.scale(loss_of(y)).backward()
            scaler.unscale_(update)
            if model is cut:
                hetconv.clip_grad_norm_(cut, 5.0)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(update)
            scaler.update()
    states = [truth.state_dict(), serial.state_dict(), hetconv.full_state_dict(cut)]
    exact, *others = (
        torch.cat([v.double().flatten() for v in s.values()]) for s in states
    )
    errors = [float((other - exact).norm() / exact.norm()) for other in others]
    return errors[0], errors[1], [s.get_scale() for s in scalers[1:]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_training_in_half_precision_with_scaled_losses(
    kind: SplitKind, dtype: torch.dtype
) -> None:
    for serial, cut, scales in on_ranks(3, scaled_training, kind, dtype):
        assert 0 < cut <= 3 * serial
        assert scales[0] == scales[1]


def in_other_precisions() -> str:
    """What is said where one rank alone computes in half precision."""
    _, cut = pair(NETS["unet"][0], splits_of(NETS["unet"][0](), ("height",), (2, 1)), 2)
    cut.float()
    with (
        torch.autocast(
            "cpu", torch.bfloat16, enabled=torch.distributed.get_rank() == 1
        ),
        pytest.raises(hetconv.DisagreementError) as error,
    ):
        cut(torch.randn(1, 3, 17, 14))
    return str(error.value)


def test_ranks_in_other_precisions_are_refused() -> None:
    assert all(
        "autocast torch.bfloat16" in said for said in on_ranks(2, in_other_precisions)
    )


def unlike_channels_last(net: str, kind: SplitKind) -> tuple[Differences, list[str]]:
    """Differences, and modules whose images lie in another way than channels-last."""
    make, (_, *shape) = NETS[net]
    serial, cut = pair(make, splits_of(make(), (kind,), (2, 1)), 2)
    found: list[str] = []

    def look(name: str, y: Tensor) -> None:
        part = y.local if isinstance(y, HetTensor) else y
        if (
            part.dim() == 4
            and part.numel()
            and not part.is_contiguous(memory_format=torch.channels_last)
        ):
            found.append(f"{name}: {tuple(part.shape)} by {part.stride()}")

    for model in (serial, cut):
        model.to(memory_format=torch.channels_last)
        for name, module in model.named_modules():
            module.register_forward_hook(lambda _, args, y, name=name: look(name, y))
    x = torch.randn(4, *shape).to(memory_format=torch.channels_last)
    expected, y = serial(x), cut(x)
    loss_of(y).backward()
    loss_of(expected).backward()
    gradients = full_gradients(cut)
    differences = {k: apart(gradients[k], p.grad) for k, p in serial.named_parameters()}
    return differences | {
        "output": apart(y, expected),
        "strides": float(y.stride() != expected.stride()),
    }, found


@pytest.mark.parametrize("net", ["unet", "mobile"])
@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_images_stay_channels_last(net: str, kind: SplitKind) -> None:
    answers = on_ranks(2, unlike_channels_last, net, kind)
    assert_same([differences for differences, _ in answers])
    assert not [found for _, found in answers if found]


class Gathers(nn.Module):
    """Images, and what a model makes of them by views, that operators want whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = (
            nn.Conv2d(3, 6, 3, padding=1),
            nn.ConvTranspose2d(6, 5, 2, 2),
        )
        self.last = nn.Conv2d(11, 6, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        heads = (y * 2).reshape(len(y), 3, 2, -1)  # of four dimensions, but no images
        return self.last(
            torch.cat([self.up(y), F.interpolate(y, scale_factor=2)], 1)
        ), heads.tril().view(len(y), -1)


def lying(
    kind: SplitKind, memory_format: torch.memory_format
) -> tuple[list[bool], Differences]:
    """Whether own parts, or wholes, of what is joined and of results lie as the images
    of a serial model.
    """
    serial, cut = pair(Gathers, splits_of(Gathers(), (kind,), (5, 1)), 2)
    seen: list[bool] = []

    def look(_: nn.Module, args: tuple[Tensor]) -> None:
        part = args[0].local if isinstance(args[0], HetTensor) else args[0]
        seen.append(
            not part.numel()
            or memory_format == torch.contiguous_format
            or part.stride(1) == 1
        )

    cut.last.register_forward_pre_hook(look)
    x = torch.randn(2, 3, 8, 6).to(memory_format=memory_format)
    serial.to(memory_format=memory_format)  # type: ignore[call-overload]
    both = [*zip(serial(x), cut.to(memory_format=memory_format)(x), strict=True)]  # type: ignore[call-overload]
    return [*seen, *(a.stride() == b.stride() for a, b in both)], {
        str(i): apart(a, b) for i, (a, b) in enumerate(both)
    }


@pytest.mark.parametrize(
    "memory_format", [torch.channels_last, torch.contiguous_format], ids=str
)
@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_what_is_gathered_lies_as_on_one_device(
    kind: SplitKind, memory_format: torch.memory_format
) -> None:
    answers = on_ranks(2, lying, kind, memory_format)
    assert_same([differences for _, differences in answers])
    assert all(all(alike) for alike, _ in answers)


def converted() -> str:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(ResNet())
    plain = ResNet()
    with pytest.raises(PlanError) as error:
        hetconv.parallelize(
            model, plan_of(plain, splits_of(plain, ("height",), (2, 1)), 2)
        )
    return str(error.value)


def test_sync_batch_norm_is_refused_by_name() -> None:
    for said in on_ranks(2, converted):
        assert "'bn' is a SyncBatchNorm" in said
        assert "leave convert_sync_batchnorm out" in said
