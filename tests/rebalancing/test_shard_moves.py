"""Everything that belongs to a parameter moves with it; a failure leaves the old plan."""

from __future__ import annotations

import copy
import dataclasses
import random
import resource
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import hetconv
from hetconv.comm.rank_group import count_sent
from hetconv.errors import HetConvError
from hetconv.nn.split_layer import SplitLayer
from hetconv.sharding.moves import bytes_per_pair
from hetconv.sharding.split import Split, SplitKind
from tests.nets import plan_of
from tests.rebalancing.test_migrate import (
    Net,
    assert_same_bits,
    splits,
    states,
    train,
)
from tests.rebalancing.test_migrate import plan_of as train_plan
from tests.spawn import on_ranks

Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]
KINDS: tuple[SplitKind, ...] = (
    "height",
    "width",
    "filter",
    "channel",
    "sample",
    "replicate",
)
OPTIMIZERS: Optimizers = {
    "amsgrad": lambda params: torch.optim.Adam(params, 1e-3, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, 1e-3),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 1e-3, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
}


def drawn(world: int, seed: int) -> dict[str, Split]:
    """Draws a plan with sizes of any ratio, also of nothing."""
    draw = random.Random(seed)
    found = {}
    for name, channels in (("a", 8), ("b", 8), ("head", 4)):
        kind = draw.choice(KINDS if name != "head" else ("filter", "channel", "sample"))
        total = {"filter": channels, "channel": 3 if name == "a" else 8, "sample": 4}
        ratio = [draw.randint(0, 3) for _ in range(world)]
        ratio[draw.randrange(world)] += 1
        if kind in total:
            cuts = sorted(draw.randint(0, total[kind]) for _ in range(world - 1))
            sizes = tuple(b - a for a, b in pairwise((0, *cuts, total[kind])))
            found[name] = Split(kind, sizes)
        else:
            found[name] = Split(kind, () if kind == "replicate" else tuple(ratio))
    return found


def migrates_between_drawn_plans(world: int, optimizer: str, seeds: range) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain = Net()
    plans = [train_plan(plain, world, drawn(world, seed)) for seed in seeds]
    stays, moves = (
        hetconv.parallelize(copy.deepcopy(plain), plans[0]) for _ in range(2)
    )
    fixed, moved = (OPTIMIZERS[optimizer](m.parameters()) for m in (stays, moves))
    params = [id(p) for p in moves.parameters()]
    train(stays, fixed, 2, 0), train(moves, moved, 2, 0)
    for n, plan in enumerate([*plans[1:], plans[0]]):
        before = states(moves, moved)
        hetconv.apply_plan(moves, moved, plan)
        after = states(moves, moved)
        if dist.get_rank() == 0:  # replicas elsewhere may have been rounded otherwise
            assert_same_bits(before, after)
        assert [id(p) for p in moves.parameters()] == params
        expected = train(stays, fixed, 5, n + 1)
        assert train(moves, moved, 5, n + 1) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(
    ("world", "optimizer"), [(2, "amsgrad"), (3, "adamw"), (4, "rmsprop")]
)
def test_any_two_of_20_drawn_plans(world: int, optimizer: str) -> None:
    on_ranks(world, migrates_between_drawn_plans, world, optimizer, range(20))


def keeps_hooks_and_last_graph() -> None:
    plain = Net()
    rows, slices = (train_plan(plain, 2, chosen) for chosen in splits(2)[:2])
    model = hetconv.parallelize(plain, slices)
    seen: list[torch.Size] = []
    weight = model.get_parameter("a.weight")
    weight.register_hook(lambda g: seen.append(g.shape))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    x = torch.rand(4, 3, 12, 10)
    loss = model(x).square().mean()  # lives on, with the graph of the old shapes
    loss.backward()
    hetconv.apply_plan(model, None, rows)
    again = model(x).square().mean()
    again.backward()
    assert seen == [(seen[0])] * 2 + [weight.shape] * 2
    assert seen[0] != weight.shape
    assert torch.allclose(loss, again)


def test_hooks_stay_and_a_living_graph_does_not_matter() -> None:
    on_ranks(2, keeps_hooks_and_last_graph)


def averages() -> None:
    torch.set_default_dtype(torch.float64)
    plain = Net()
    plans = [train_plan(plain, 2, chosen) for chosen in splits(2)]
    model = hetconv.parallelize(plain, plans[0])
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for plan in (plans[1], plans[2], plans[0]):
        train(model, optimizer, 1, 0)
        average.update_parameters(model)
        before = [*hetconv.full_state_dict(average).values()]
        hetconv.apply_plan(model, optimizer, plan, copies=[average])
        assert_same_bits(before, [*hetconv.full_state_dict(average).values()])
    average.update_parameters(model)
    average(torch.rand(4, 3, 12, 10))


def test_an_average_of_the_model_moves_with_it() -> None:
    on_ranks(2, averages)


def counts_bytes() -> None:
    plain = Net()
    old, new = (train_plan(plain, 2, chosen) for chosen in splits(2)[1:3])
    model = hetconv.parallelize(plain, old)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1, 0)
    expected = 0
    graph = hetconv.capture(Net(), torch.zeros(4, 3, 12, 10))
    for name, op in graph.layers.items():
        held, wanted = (op.param_shards(p.splits[name], 2) for p in (old, new))
        for param in held:
            if held[param].boxes != wanted[param].boxes:
                exchange = held[param].primary.boxes, wanted[param].boxes
                sent = bytes_per_pair((exchange,), 4 * 4)
                expected += sum(n for (a, _), n in sent.items() if a == dist.get_rank())
    with count_sent() as counts:
        hetconv.apply_plan(model, optimizer, new)
    assert counts.total() == expected > 0


def test_parameter_gradient_and_two_moments_are_sent_once() -> None:
    on_ranks(2, counts_bytes)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(1024, 2048, 3)  # 72 MiB
        self.b = nn.Conv2d(2048, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


def lacks_memory() -> str:
    net = Wide()
    old, new = (
        plan_of(net, {"a": Split("filter", sizes), "b": Split("replicate")}, 2)
        for sizes in ((1024, 1024), (32, 2016))
    )
    model = hetconv.parallelize(net, old)
    x = torch.ones(1, 1024, 3, 3)
    y = model(x)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if dist.get_rank() == 1:
        with open("/proc/self/statm") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**25, limits[1]))
    with count_sent() as counts, pytest.raises(HetConvError) as e:
        hetconv.apply_plan(model, None, new)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    assert not counts.total()
    assert torch.equal(model(x), y)
    hetconv.apply_plan(model, None, new)
    assert torch.allclose(model(x), y, atol=1e-4)
    return str(e.value)


def test_a_rank_without_the_memory_stops_all_before_anything_moves() -> None:
    for message in on_ranks(2, lacks_memory):
        assert "apply_plan, on rank 1" in message
        assert "memory" in message


def in_replicas() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("replica", "split")
    )
    plain = Net()
    plans = [train_plan(plain, 2, chosen) for chosen in splits(2)]
    models = [
        hetconv.parallelize(
            copy.deepcopy(plain), plans[0], group=mesh["split"].get_group()
        )
        for _ in range(2)
    ]
    wrapped = [
        DistributedDataParallel(m, process_group=mesh["replica"].get_group())
        for m in models
    ]
    stays, moves = ((w, torch.optim.Adam(w.parameters(), 1e-3)) for w in wrapped)
    with pytest.raises(HetConvError, match="give apply_plan the wrapper"):
        hetconv.apply_plan(models[1], moves[1], plans[1])
    seed = 10 * mesh["replica"].get_local_rank()
    for n, plan in enumerate((plans[1], plans[2], plans[0])):
        hetconv.apply_plan(*moves, plan)
        # Losses differ between replicas; weights follow the mean of their gradients.
        assert train(*moves, 3, seed + n) == pytest.approx(
            train(*stays, 3, seed + n), abs=1e-10
        )


def test_data_parallel_replicas_change_together() -> None:
    on_ranks(4, in_replicas)


def follows_chunks() -> None:
    net = Net()
    plan = train_plan(net, 2, splits(2)[0])
    model = hetconv.parallelize(net, plan)
    layers = dict(plan.layers)
    layers["a"] = dataclasses.replace(layers["a"], chunks=2)
    chunked = dataclasses.replace(plan, layers=layers)
    hetconv.apply_plan(model, None, chunked)
    layer: Any = model.get_submodule("a")
    assert isinstance(layer, SplitLayer)
    assert layer.chunks == 2


def test_a_layer_of_the_same_split_takes_over_its_chunks() -> None:
    on_ranks(2, follows_chunks)
