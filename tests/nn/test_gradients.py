"""Clipping by norm and loss scaling see whole gradients, though a rank has slices."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import hetconv
from hetconv.sharding.split import Split, SplitKind
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

NORMS = (2.0, 1.0, 3.0, math.inf)


def clipped(kinds: tuple[SplitKind, ...], ratio: tuple[int, ...]) -> Differences:
    """Norms and gradients after clipping, for norms that are and are not exceeded."""
    make, shape = NETS["resnet"]
    serial, cut = pair(make, splits_of(make(), kinds, ratio), len(ratio))
    x = torch.randn(shape)
    found: Differences = {}
    for norm_type in NORMS:
        for limit in (0.3, 1e9):
            for model in (serial, cut):
                model.zero_grad()
                loss_of(model(x)).backward()
            norm = nn.utils.clip_grad_norm_(serial.parameters(), limit, norm_type)
            case = f"{norm_type} {limit}"
            found[f"norm {case}"] = apart(
                norm, hetconv.clip_grad_norm_(cut, limit, norm_type)
            ) / float(norm)
            gradients = full_gradients(cut)
            found |= {
                f"{case} {k}": apart(gradients[k], p.grad)
                for k, p in serial.named_parameters()
            }
    return found


@pytest.mark.parametrize("ratio", [(3, 1), (1, 0, 2)])
@pytest.mark.parametrize(
    "kinds",
    [(k,) for k in IMAGE_KINDS] + [("filter", "channel", "height")],
    ids="-".join,
)
def test_clipping_is_by_the_norm_of_the_whole(
    kinds: tuple[SplitKind, ...], ratio: tuple[int, ...]
) -> None:
    assert_same(on_ranks(len(ratio), clipped, kinds, ratio))


def overflowing() -> tuple[str, float, str]:
    """The error where one rank's slice is infinite, what clipping has changed then, and
    the error of a wrong norm.
    """
    torch.manual_seed(0)
    model = ResNet().double()
    cut = hetconv.parallelize(
        model, plan_of(model, splits_of(model, ("filter",), (3, 1)), 2)
    )
    loss_of(cut(torch.randn(2, 3, 20, 20, dtype=torch.float64))).backward()
    if torch.distributed.get_rank() == 1:
        cut.stem.weight.grad[0] = math.inf
    before = copy.deepcopy([p.grad for p in cut.parameters()])
    with pytest.raises(hetconv.HetConvError) as error:
        hetconv.clip_grad_norm_(cut, 1.0, error_if_nonfinite=True)
    changed = sum(
        not torch.equal(p.grad, g)
        for p, g in zip(cut.parameters(), before, strict=True)
    )  # type: ignore[arg-type]
    with pytest.raises(hetconv.HetConvError) as wrong:
        hetconv.clip_grad_norm_(cut, 1.0, -1.0)
    return str(error.value), changed, str(wrong.value)


def test_an_infinite_norm_is_refused_on_every_rank() -> None:
    for error, changed, wrong in on_ranks(2, overflowing):
        assert "inf" in error
        assert changed == 0
        assert "norm_type is -1.0" in wrong


def test_a_plain_model_is_clipped_by_torch() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    for m in (model, other):
        m(torch.ones(1, 3)).sum().backward()
    norm = hetconv.clip_grad_norm_(model, 0.1)
    assert norm.equal(nn.utils.clip_grad_norm_(other.parameters(), 0.1))
    assert model.weight.grad is not None
    assert other.weight.grad is not None
    assert model.weight.grad.equal(other.weight.grad)


def scaled(overflows: bool) -> tuple[float, list[float]]:
    """(scale after an update, how far each parameter has moved), where one rank's slice
    overflows or none does.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1))
    cut = hetconv.parallelize(
        model, plan_of(model, splits_of(model, ("filter",), (3, 1)), 2)
    )
    optimizer = torch.optim.SGD(cut.parameters(), 0.1)
    scaler = hetconv.GradScaler(cut, "cpu", init_scale=4.0, growth_interval=1)
    before = [p.detach().clone() for p in cut.parameters()]
    scaler.scale(cut(torch.randn(2, 3, 8, 8)).square().mean()).backward()
    if overflows and torch.distributed.get_rank() == 1:
        assert cut[0].weight.grad is not None
        cut[0].weight.grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), [
        apart(p.detach(), b) for p, b in zip(cut.parameters(), before, strict=True)
    ]


def test_all_ranks_skip_a_step_in_which_one_slice_overflows() -> None:
    for scale, moved in on_ranks(2, scaled, True):
        assert scale == 2.0
        assert max(moved) == 0.0
    for scale, moved in on_ranks(2, scaled, False):
        assert scale == 8.0
        assert moved[0] > 0.0


def torchs_own(kind: SplitKind) -> list[str]:
    """What is said of torch's own functions, of the model and of a copy; "nothing"
    where they are right.
    """
    serial, cut = pair(
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 4, 3)), _both(kind), 2
    )
    models, x, said = (cut, copy.deepcopy(cut)), torch.randn(2, 4, 8, 8), list[str]()
    for model in (serial, *models):
        model(x).square().mean().backward()
    before = [full_gradients(model) for model in models]
    norm = nn.utils.clip_grad_norm_(serial.parameters(), 0.1)
    for model, gradients in zip(models, before, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        try:
            assert (
                apart(nn.utils.clip_grad_norm_(model.parameters(), 0.1), norm) <= 1e-12
            )
            gradients = {name: p.grad for name, p in serial.named_parameters()}
            said.append("nothing")
        except hetconv.HetConvError as e:
            said.append(str(e))
        try:
            scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
            said.append("nothing")
        except hetconv.HetConvError as e:
            said.append(str(e))
        after = full_gradients(model)
        assert max(apart(after[name], gradients[name]) for name in gradients) <= 1e-12
        nn.utils.clip_grads_with_norm_(
            model.parameters(), 0.1, norm
        )  # with the norm of the whole it is right
    return said


def _both(kind: SplitKind) -> dict[str, Split]:
    sizes: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
        "filter": ((4, 2), (3, 1)),
        "channel": ((3, 1), (4, 2)),
    }
    return {str(i): Split(kind, sizes.get(kind, ((2, 1), (2, 1)))[i]) for i in range(2)}


def test_torchs_own_functions_are_right_or_refused() -> None:
    for kind in ("filter", "channel"):
        for clip, scale, *copied in on_ranks(2, torchs_own, kind):
            assert "of a HetConv2d" in clip
            assert "call hetconv.clip_grad_norm_(model, max_norm)" in clip
            assert "use hetconv.GradScaler(model)" in scale
            assert len(copied) == 2
            assert "nothing" not in copied
    assert on_ranks(2, torchs_own, "height") == [["nothing"] * 4] * 2
