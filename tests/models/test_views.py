"""Nets of views, shapes and reductions, some written to, on shards: equal to the whole,
and send the planned bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv.cost.estimator import estimate
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.sharding.split import Split
from tests.equivalence import Differences, apart, assert_same, full_gradients, loss_of
from tests.nets import plan_of
from tests.ops.test_views import shuffled
from tests.placed import WORLD
from tests.spawn import on_ranks


class Shapes(nn.Module):
    """Two convolutions with ``between`` in the middle and ``after`` at the end."""

    def __init__(
        self, between: Callable[[Tensor], Tensor], after: Callable[[Tensor], Any]
    ) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        self.between, self.after = between, after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.second(self.between(self.first(x))))


def turned(x: Tensor) -> Tensor:
    x = x.permute(0, 2, 3, 1)
    x = F.gelu(x) * x.mean(-1, keepdim=True)
    return x.permute(0, 3, 1, 2)


def gated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    c, d = (a * b).split([1, 3], dim=1)
    return torch.cat([c, d, a[:, 1:], b[:, :1]], 1)


def halves_written_to(x: Tensor) -> Tensor:
    x[:, :4].mul_(2)
    x.narrow(1, 2, 2).copy_(x[:, 6:] * 0.5)
    return x


def all_written_to(x: Tensor) -> Tensor:
    x = x * 1
    flat = x.view(x.shape[0], -1)
    turned = x.transpose(2, 3)
    flat.add_(1)
    turned.mul_(2)
    return x


def view_of_a_view(x: Tensor) -> Tensor:
    x = x * 1
    turned = x[:, 1:].permute(2, 3, 0, 1)
    turned[1].add_(turned.diagonal(0, 0, 1).sum())
    return x


def heads(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    y = x.reshape(n, 2, c // 2, h * w)
    return (y * y.softmax(2)).reshape(n, c, h, w) + y.unflatten(3, (h, w)).flatten(1, 2)


def folded(x: Tensor) -> Tensor:
    """Every second pixel, from each of four, as channels and back."""
    quarters = [x[:, ::2, a::2, b::2] for a in (0, 1) for b in (0, 1)]
    return F.pixel_shuffle(torch.cat(quarters, 1)[:, :16], 2).repeat_interleave(2, 1)


def joined(x: Tensor) -> Tensor:
    """Along samples and rows, so that parts move."""
    y = torch.cat([x, x[:, :, :3] * 2, x.flip(1)], 2)[:, :, 2:10]
    return torch.cat([y, x], 0)[1:3] + torch.zeros_like(x) * x.new_ones(5)[2]


def extremes(x: Tensor) -> Tensor:
    values, indices = x.max(1, keepdim=True)
    return (
        x * values
        + indices * x.std(2, keepdim=True)
        + F.normalize(x, dim=1).masked_fill(x < 0, 0.5)
    )


def padded(x: Tensor) -> Tensor:
    y = F.pad(F.pad(x, (1, 2, 3, 1), "circular"), (5, 0, 4, 6), "reflect")
    return F.interpolate(F.adaptive_max_pool2d(y, (7, 5)), (8, 8), mode="area")


def attended(x: Tensor) -> Tensor:
    """Among channels, and then among rows, which are cut."""
    y = torch.einsum("nchw,nkhw->nck", x, x).softmax(-1) @ x.flatten(2)
    y = y.unflatten(2, x.shape[2:])
    return (y @ x.mT).tanh() @ y * 0.1


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": turned,
    "gated": gated,
    "shuffled": shuffled,
    "heads": heads,
    "halves written to": halves_written_to,
    "all written to": all_written_to,
    "view of a view": view_of_a_view,
    "folded": folded,
    "joined": joined,
    "extremes": extremes,
    "padded": padded,
    "attended": attended,
}
AFTER: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda x: x.mean((2, 3)),
    "sums": lambda x: (x.sum(1).amax(2), x.square().mean()),
    "cropped": lambda x: torch.stack(x[:, :, 1:5].unbind(1)[:3]).var(0),
}
Sent = dict[int, int]


def planned_and_sent(
    between: str, after: str, kinds: tuple[Any, Any]
) -> tuple[Differences, list[tuple[Sent, Sent]]]:
    """Differences of one step, and bytes to every other rank as counted and as planned:
    training, then inference.
    """
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Shapes(BETWEEN[between], AFTER[after])
    rank = torch.distributed.get_rank()
    sizes = {kind: (4, 0, 4) if kind == "filter" else (5, 1, 2) for kind in kinds}
    splits = {
        name: Split(kind, sizes[kind])
        for name, kind in zip(("first", "second"), kinds, strict=True)
    }
    x = torch.randn(2, 8, 8, 8)
    expected = model(x.requires_grad_())
    loss_of(expected).backward()
    graphs = {"train": hetconv.capture(model, x)}
    with torch.no_grad():
        graphs["infer"] = hetconv.capture(model, x)
    wanted, grads = x.grad, {k: p.grad for k, p in model.named_parameters()}
    x.grad, model = None, model.requires_grad_()
    model.zero_grad()
    cut = hetconv.parallelize(model, plan_of(model, splits, WORLD))
    bytes_: list[tuple[Sent, Sent]] = []
    found: Differences = {}
    for mode, graph in graphs.items():
        prediction, _ = estimate(
            graph,
            ClusterProfile.from_devices(["cpu"] * WORLD, link="host"),
            splits,
            mode,
        )  # type: ignore[arg-type]
        with hetconv.count_sent() as sent, torch.set_grad_enabled(mode == "train"):
            result = cut(x)
            loss = loss_of(result)
            if mode == "train":
                loss.backward()
        found[mode] = apart(loss, loss_of(expected))
        bytes_.append(
            (dict(sent), {r: n for r, n in enumerate(prediction.sent_bytes[rank]) if n})
        )
    found["x"] = (
        float((x.grad - wanted).abs().max())
        if x.grad is not None and wanted is not None
        else float("inf")
    )
    for name, g in full_gradients(cut).items():
        found[name] = apart(g, grads[name])
    return found, bytes_


KINDS = (
    ("height", "height"),
    ("sample", "width"),
    ("filter", "channel"),
    ("channel", "height"),
)
CASES = [
    (between, list(AFTER)[(i + j) % 3], j)
    for i, between in enumerate(BETWEEN)
    for j in range(len(KINDS))
]


@pytest.mark.parametrize(("between", "after", "kinds"), CASES)
def test_models_train_as_on_one_device_and_send_what_is_planned(
    between: str, after: str, kinds: int
) -> None:
    answers = on_ranks(WORLD, planned_and_sent, between, after, KINDS[kinds])
    assert_same([found for found, _ in answers])
    for _, pairs in answers:
        for sent, planned in pairs:
            assert sent == planned
