"""Serial equivalence: a model on several ranks against the same model on one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetconv
from hetconv.nn.split_layer import SplitLayer
from hetconv.nn.state_dict import Share
from hetconv.schemas.plan import Mode
from hetconv.sharding.layout import Layout
from hetconv.sharding.split import Split
from hetconv.tracing.graph import Graph
from tests.nets import plan_of

P, T = ParamSpec("P"), TypeVar("T")
Differences = dict[str, float]
Difference = Callable[[Tensor | None, Tensor | None], float]
Model = Callable[..., Any]
TOLERANCE = 1e-10
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, 1e-3),
}


def from_rank_0(make: Callable[P, T]) -> Callable[P, T]:
    """Has rank 0 make what all ranks get: a plan takes long, and theirs would be the same."""

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        if not dist.is_initialized():
            return make(*args, **kwargs)
        found: list[Any] = [make(*args, **kwargs) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        first: T = found[0]
        return first

    return made


@cache
@from_rank_0
def captured(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    mode: Mode,
    input_gradient: bool,
) -> Graph:
    """A rank keeps it: most of a test's time would go into making the same again."""
    with torch.set_grad_enabled(mode == "train"):
        return hetconv.capture(
            make().train(mode == "train"),
            torch.zeros(shape, requires_grad=input_gradient),
        )


def assert_same(found: list[Differences]) -> None:
    wrong = [
        {k: v for k, v in differences.items() if not v <= TOLERANCE}
        for differences in found
    ]
    assert not any(wrong), wrong
    assert all(found)


def apart(a: Tensor | None, b: Tensor | None) -> float:
    """The largest difference; infinite where one is missing or of another shape."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a.shape != b.shape or type(a) is not type(b):
        return float("inf")
    return (
        float((a.detach().double() - b.detach().double()).abs().max())
        if a.numel()
        else 0.0
    )


def relative(a: Tensor | None, b: Tensor | None) -> float:
    """‖a - b‖ / ‖b‖, for types in which a rounding may turn a ReLU."""
    rough = apart(a, b)
    if a is None or b is None or rough in (0.0, float("inf")):
        return rough
    return float(
        (a.detach().double() - b.detach().double()).norm() / b.detach().double().norm()
    )


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients of the whole parameters by name; collective."""
    found = {name: p.grad for name, p in model.named_parameters()}
    for path, layer in model.named_modules():
        if isinstance(layer, SplitLayer):
            for name, held in layer.held.items():
                key, grad = f"{path}.{name}".lstrip("."), getattr(layer, name).grad
                if not held.is_replicated and grad is not None:
                    owned = Share(held, layer.group).owned(grad)
                    whole = Layout.replicated(held.shape, layer.group.size)
                    found[key] = hetconv.redistribute(
                        owned.local,
                        owned.placement,
                        whole,
                        group=layer.group.process_group,
                    )
    return found


def leaves(result: Any) -> list[Tensor]:
    return [y for y in torch.utils._pytree.tree_leaves(result) if isinstance(y, Tensor)]


def loss_of(result: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for y in leaves(result):
        weights = torch.linspace(
            -1, 2, y.numel(), dtype=torch.float64, device=y.device
        ).view(y.shape)
        total = total + (y.double() * weights).sum() + y.double().square().mean()
    return total


def pair(
    make: Callable[[], nn.Module],
    splits: Mapping[str, Split],
    world: int,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[nn.Module, nn.Module]:
    """A model in float64, or in ``dtype``, and the same one cut up."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    serial = make().to(device or torch.get_default_device(), dtype)
    cut = copy.deepcopy(serial)
    return serial, hetconv.parallelize(cut, plan_of(cut, splits, world))


def one_step(
    serial: nn.Module, cut: nn.Module, *inputs: Tensor, by: Difference = apart
) -> Differences:
    """Outputs, loss and all gradients of one forward and backward."""
    mine = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    theirs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    expected, result = serial(*theirs), cut(*mine)
    loss, expected_loss = loss_of(result), loss_of(expected)
    loss.backward()
    expected_loss.backward()
    same = zip(leaves(result), leaves(expected), strict=True)
    found = {f"output {i}": by(a, b) for i, (a, b) in enumerate(same)} | {
        "loss": by(loss, expected_loss)
    }
    found |= {
        f"input gradient {i}": by(a.grad, b.grad)
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True))
    }
    gradients = full_gradients(cut)
    return found | {
        f"gradient {k}": by(gradients[k], p.grad) for k, p in serial.named_parameters()
    }


def same_state(serial: nn.Module, cut: nn.Module) -> Differences:
    state, expected = hetconv.full_state_dict(cut), serial.state_dict()
    assert list(state) == list(expected)
    return {f"state {k}": apart(state[k], expected[k]) for k in expected}


def train(
    make: Callable[[], nn.Module],
    splits: Mapping[str, Split],
    shape: tuple[int, ...],
    world: int,
    optimizer: str = "sgd",
    steps: int = 5,
) -> Differences:
    """The largest differences over some steps of training, then in evaluation."""
    serial, cut = pair(make, splits, world)
    updates = [OPTIMIZERS[optimizer](m.parameters()) for m in (serial, cut)]
    worst: Differences = {}
    for _ in range(steps):
        for update in updates:
            update.zero_grad()
        found = one_step(serial, cut, torch.randn(shape))
        worst = {
            k: max(v, worst.get(k, 0.0), key=lambda d: float("inf") if d != d else d)
            for k, v in found.items()
        }
        for update in updates:
            update.step()
    serial.eval(), cut.eval()
    x = torch.randn(shape)
    with torch.no_grad():
        pairs = zip(leaves(cut(x)), leaves(serial(x)), strict=True)
        worst |= {
            f"evaluated output {i}": apart(a, b) for i, (a, b) in enumerate(pairs)
        }
    return worst | same_state(serial, cut)
