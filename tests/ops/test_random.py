"""Dropout and noise on shards: not the numbers of one device, but the laws that random
numbers have to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hetconv
from hetconv.comm.rank_group import rank_group_of
from hetconv.cost.estimator import estimate
from hetconv.nn import parallelize
from hetconv.runtime.het_tensor import HetTensor
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.sharding.layout import Layout
from hetconv.sharding.split import SplitKind
from tests.equivalence import Differences, apart, loss_of
from tests.nets import plan_of, splits_of
from tests.placed import PLACEMENTS, WORLD, check, on_parts, placed
from tests.spawn import on_ranks

SHAPE, RATE = (
    (6, 24, 15, 18),
    0.3,
)  # every dimension divides among the ranks, so that parts compare
CUTS = [
    Layout.sharded(SHAPE, dim, (n // WORLD,) * WORLD) for dim, n in enumerate(SHAPE)
]
Fn = Callable[[Tensor, float], Tensor]
NUMBERS: dict[str, Fn] = {
    "dropout": F.dropout,
    "torch.dropout": lambda x, p: torch.dropout(x, p, True),
    "in place": lambda x, p: F.dropout(x * 1, p, inplace=True),
    "module in place": lambda x, p: nn.Dropout(p, inplace=True)(x * 1),
    "alpha_dropout": lambda x, p: F.alpha_dropout(x, p, training=True),
}
FEATURES: dict[str, Fn] = {
    "dropout2d": F.dropout2d,
    "module": lambda x, p: nn.Dropout2d(p)(x),
    "feature_dropout": lambda x, p: torch.feature_dropout(x, p, True),
    "feature_alpha_dropout": lambda x, p: F.feature_alpha_dropout(x, p, training=True),
    "dropout1d": lambda x, p: F.dropout1d(x.flatten(2), p).unflatten(2, x.shape[2:]),
    "dropout3d": lambda x, p: F.dropout3d(x[..., None], p)[..., 0],
}
DROPOUTS = NUMBERS | FEATURES


def dropped(name: str, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of ones on parts: the own part, its gradient of a gradient, and the state of the
    shared generator after it.
    """
    local = torch.ones(layout.boxes[dist.get_rank()].shape, requires_grad=True)
    y = DROPOUTS[name](HetTensor.wrap(local, layout, rank_group_of()), RATE)
    assert isinstance(y, HetTensor)
    assert y.placement == layout
    g = torch.rand_like(y.local) + 1
    y.local.backward(g)
    assert local.grad is not None
    return y.local.detach(), local.grad, g, torch.get_rng_state()


def of_features(y: Tensor) -> Tensor:
    """(N, C), of what is the same all over each map."""
    assert (y == y[:, :, :1, :1]).all()
    return y[:, :, 0, 0]


def assert_share(share: float, expected: float, count: int) -> None:
    """Within five standard deviations of a share of so many draws."""
    assert abs(share - expected) <= 5 * (expected * (1 - expected) / count) ** 0.5


EACH = [
    (name, dim)
    for name in DROPOUTS
    for dim in range(4)
    if (name, dim) != ("dropout1d", 3)
]  # which has no rows


@pytest.mark.parametrize(("name", "dim"), EACH)
def test_dropout(name: str, dim: int) -> None:
    """As many as the rate says are dropped, on each rank others, and forward and
    backward drop the same ones.
    """
    found = on_ranks(WORLD, dropped, name, CUTS[dim])
    kept = [y == y.max() for y, *_ in found]
    for (y, grad, g, _), mask in zip(found, kept, strict=True):
        assert ((grad != 0) == mask).all()
        if "alpha" not in name:
            torch.testing.assert_close(grad, y * g)
            torch.testing.assert_close(y, mask / (1 - RATE))
    same = name in FEATURES and dim > 1
    kept = [of_features(mask) for mask in kept] if name in FEATURES else kept
    for mask in kept:
        assert_share(float(mask.double().mean()), 1 - RATE, mask.numel())
    for a, b in combinations(kept, 2):
        assert_share(
            float((a == b).double().mean()),
            1.0 if same else RATE**2 + (1 - RATE) ** 2,
            a.numel(),
        )


def drawn_again(name: str) -> list[bool]:
    """Whether the same seed gives the same part again, another call another one; and
    ranks stay in step.
    """
    results = []
    for seed in (5, 5, None):
        if seed is not None:
            torch.manual_seed(seed)
        results.append(dropped(name, CUTS[2]))
    (a, *_, first), (b, *_, second), (c, *_, third) = results
    states = [torch.empty_like(third) for _ in range(WORLD)]
    dist.all_gather(states, third)
    return [
        torch.equal(a, b),
        torch.equal(first, second),
        not torch.equal(a, c),
        not torch.equal(second, third),
        *(torch.equal(state, third) for state in states),
    ]


@pytest.mark.parametrize("name", DROPOUTS)
def test_a_seed_says_what_is_drawn_and_ranks_stay_in_step(name: str) -> None:
    assert all(map(all, on_ranks(WORLD, drawn_again, name)))


def everywhere(name: str, rate: float) -> dict[str, Differences]:
    return {
        place: on_parts(lambda x, z, p: DROPOUTS[name](x, rate), place)
        for place in PLACEMENTS
    }


@pytest.mark.parametrize("rate", [0.0, 1.0])
@pytest.mark.parametrize("name", DROPOUTS)
def test_all_or_nothing_is_dropped_as_on_one_device(name: str, rate: float) -> None:
    check(on_ranks(WORLD, everywhere, name, rate))


def as_on_one_rank(place: str) -> Differences:
    """Also the state of the generator after it."""
    states = []

    def fn(x: Tensor, z: Tensor, p: Any) -> Tensor:
        torch.manual_seed(5)
        y = F.dropout(x, RATE)
        states.append(torch.get_rng_state())
        return y

    found = on_parts(fn, place)
    return found | {"state": apart(*states)}


@pytest.mark.parametrize("place", ["replicated", "rows in another order"])
def test_what_is_not_drawn_on_parts_is_drawn_as_on_one_rank(place: str) -> None:
    check([{place: found} for found in on_ranks(WORLD, as_on_one_rank, place)])


def with_empty_parts(name: str) -> list[bool]:
    """Whether parts, of which some are empty, have gradients of their own, and the
    ranks stay in step.
    """
    said = []
    for layout in PLACEMENTS.values():
        x, local = placed(torch.ones(layout.shape), layout)
        y = DROPOUTS[name](x, RATE)
        hetconv.gather(y).sum().backward()
        state = torch.get_rng_state()
        states = [torch.empty_like(state) for _ in range(WORLD)]
        dist.all_gather(states, state)
        said += [
            local.grad is not None and local.grad.shape == local.shape,
            all(torch.equal(state, s) for s in states),
        ]
    return said


@pytest.mark.parametrize("name", DROPOUTS)
def test_an_empty_part_keeps_in_step(name: str) -> None:
    assert all(map(all, on_ranks(WORLD, with_empty_parts, name)))


def checkpointed(name: str) -> tuple[Tensor, Tensor]:
    x, local = placed(torch.rand(SHAPE, dtype=torch.float64) + 1, CUTS[2])
    y = checkpoint(lambda x: DROPOUTS[name](x, RATE).square(), x, use_reentrant=False)
    F.dropout(x, RATE)
    y.local.sum().backward()
    assert local.grad is not None
    return local.grad, 2 * y.local.detach() / local.detach()


@pytest.mark.parametrize("name", ["dropout", "dropout2d"])
def test_a_checkpoint_drops_the_same_again(name: str) -> None:
    for grad, expected in on_ranks(WORLD, checkpointed, name):
        torch.testing.assert_close(grad, expected)


NOISE: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint_like": lambda x: torch.randint_like(x, 0, 10),
    "bernoulli": lambda x: torch.bernoulli(x),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.4),
    "empty_like": lambda x: torch.empty_like(x).exponential_(),
    "normal_": lambda x: x.clone().normal_(0, 2),
    "uniform_": lambda x: x.clone().uniform_(),
    "rrelu": lambda x: F.rrelu(-x, training=True),
}


def noise(name: str) -> tuple[Tensor, Tensor, Tensor, int]:
    """Twice from one seed, the generator's state, and bytes sent."""
    box = CUTS[3].boxes[dist.get_rank()]
    x = HetTensor.wrap(torch.full(box.shape, 0.5), CUTS[3], rank_group_of())
    made = []
    with hetconv.count_sent() as sent:
        for _ in range(2):
            torch.manual_seed(7)
            y = NOISE[name](x)
            assert isinstance(y, HetTensor)
            assert y.placement == CUTS[3]
            made.append(y.local)
    return *made, torch.get_rng_state(), sum(sent.values())


@pytest.mark.parametrize("name", NOISE)
def test_noise_is_each_rank_s_own(name: str) -> None:
    found = on_ranks(WORLD, noise, name)
    for (a, again, state, sent), (b, _, other, _) in combinations(found, 2):
        assert torch.equal(a, again)
        assert float((a == b).double().mean()) < 0.6
        assert torch.equal(state, other)
        assert not sent


def from_a_generator() -> list[Tensor]:
    x = HetTensor.wrap(
        torch.full(CUTS[3].boxes[dist.get_rank()].shape, 0.5), CUTS[3], rank_group_of()
    )
    own = torch.Generator().manual_seed(3)
    return [
        hetconv.gather(torch.bernoulli(x, generator=own)),
        hetconv.gather(torch.normal(x, x)),
    ]


def test_a_generator_that_is_given_draws_the_whole() -> None:
    torch.manual_seed(0)
    half = torch.full(SHAPE, 0.5)
    expected = [
        torch.bernoulli(half, generator=torch.Generator().manual_seed(3)),
        torch.normal(half, half),
    ]
    for found in on_ranks(WORLD, from_a_generator):
        assert all(map(torch.equal, found, expected))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout2d(F.dropout(self.a(x), RATE, self.training), RATE, self.training)
        return F.dropout(
            self.b(y + 0.1 * torch.randn_like(y)) * y.new_ones((4, 1, 1)),
            RATE,
            self.training,
        )


def sent_and_planned(kind: SplitKind) -> tuple[dict[int, int], dict[int, int]]:
    model, x = Dropping(), torch.randn(2, 3, 9, 6)
    splits = splits_of(model, (kind,), (2, 1, 1))
    graph = hetconv.capture(model, x)
    planned, _ = estimate(
        graph,
        ClusterProfile.from_devices(["cpu"] * WORLD, link="host"),
        splits,
        "train",
    )
    cut = hetconv.parallelize(model, plan_of(model, splits, WORLD))
    with hetconv.count_sent() as sent:
        loss_of(cut(x)).backward()
    return dict(sent), {
        r: n for r, n in enumerate(planned.sent_bytes[dist.get_rank()]) if n
    }


@pytest.mark.parametrize("kind", ["sample", "filter", "channel", "height"])
def test_models_that_draw_send_what_is_planned(kind: SplitKind) -> None:
    for sent, planned in on_ranks(WORLD, sent_and_planned, kind):
        assert sent == planned


def drawn_on_unlike_devices() -> list[str]:
    """What is said of random functions as where one rank computes on a CPU and another
    one on a GPU.
    """
    group, said = rank_group_of(), []
    group.agreements.draws_alike = False
    try:
        x = placed(torch.ones(SHAPE), CUTS[2])[0]
        F.dropout(x, RATE)  # each rank draws its own
        whole = placed(torch.ones(SHAPE), Layout.replicated(SHAPE, WORLD))[0]
        for function in (
            lambda: F.dropout2d(x, RATE),
            lambda: F.dropout(whole, RATE),
            lambda: torch.rand_like(whole),
        ):
            with pytest.raises(hetconv.HetConvError) as e:
                function()
            said.append(str(e.value))
    finally:
        group.agreements.draws_alike = True
    return said


def test_ranks_that_would_draw_different_numbers_for_one_value_are_refused() -> None:
    for said in on_ranks(WORLD, drawn_on_unlike_devices):
        names = ("dropout2d", "dropout", "rand_like")
        assert all(
            text.startswith(f"{name} draws")
            for text, name in zip(said, names, strict=True)
        )


def states_shared(on_cuda: bool) -> tuple[bool, list[Tensor]]:
    """Whether all ranks draw alike, and what each GPU's generator is set to; only the
    second rank has none.
    """
    rank, found = dist.get_rank(), list[Tensor]()
    has_one = on_cuda and rank != 1
    parameters = [
        SimpleNamespace(
            device=torch.device("cuda", 0) if has_one else torch.device("cpu")
        )
    ]
    model: Any = SimpleNamespace(parameters=lambda: iter(parameters))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.cuda,
            "get_rng_state",
            lambda index: torch.full((2,), rank + 5 + index, dtype=torch.uint8),
        )
        patch.setattr(
            torch.cuda, "set_rng_state", lambda state, index: found.append(state)
        )
        parallelize._share_random_state(rank_group_of(), model)
    alike = rank_group_of().agreements.draws_alike
    rank_group_of().agreements.draws_alike = True
    return alike, found


def test_ranks_of_which_only_some_have_a_gpu_share_what_they_have() -> None:
    (alike, first), (_, without), (_, last) = on_ranks(WORLD, states_shared, True)
    assert not alike
    assert without == []
    assert first[0].equal(last[0])
    assert on_ranks(WORLD, states_shared, False) == [(True, [])] * WORLD
