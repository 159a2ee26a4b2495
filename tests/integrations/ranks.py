"""What several integrations are tested with: a plain training loop, and a rank's environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hetconv
from tests.nets import Chain, plan_of, splits_of

T = TypeVar("T")
MAX_NORM = 0.5
KINDS = ("filter", "channel", "height")


class Run(NamedTuple):
    """What a training run shows."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    weights: dict[str, Tensor]

    def differs_from(self, other: Run) -> float:
        """The largest relative difference of two runs."""
        pairs = [*zip(self[:3], other[:3], strict=True)]
        numbers = [(torch.tensor(a), torch.tensor(b)) for a, b in pairs]
        weights = [(a, other.weights[k]) for k, a in self.weights.items()]
        return max(
            float((a - b).abs().max() / b.abs().max()) for a, b in numbers + weights
        )


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return Chain()


def split_model() -> nn.Module:
    """Of unequal slices, so that a rank's own norm is not another one's."""
    plain = new_model()
    plan = plan_of(plain, splits_of(plain, KINDS, (3, 1)), dist.get_world_size())
    return hetconv.parallelize(plain, plan)


def new_loader(seed: int = 0) -> DataLoader[Any]:
    """5 batches, the last one of them smaller."""
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(18, 4, 16, 16, generator=draw), torch.arange(18) % 3
    order = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(x, y), 4, shuffle=True, generator=order)


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def plain_run(epochs: int = 2) -> Run:
    model, loader = new_model(), new_loader()
    optimizer, scheduler = optimizer_of(model)
    run = Run([], [], [], {})
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
            note(run, loss, norm, scheduler)
    return run._replace(weights=model.state_dict())


def note(run: Run, loss: Tensor, norm: Tensor, scheduler: Any) -> None:
    run.losses.append(loss.item())
    run.norms.append(norm.item())
    run.rates.append(scheduler.get_last_lr()[0])


def under_torchrun(function: Callable[..., T], *args: Any) -> T:
    """Calls a function on a rank in the environment that torchrun gives it."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0"}
    sizes = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    store = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "t"}
    with mock.patch.dict(os.environ, names | sizes | store):
        return function(*args)
