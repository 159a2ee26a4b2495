"""The state of a model and its optimizer in whole tensors: from a split model to a
plain one, to torch's, and back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

import hetconv
from hetconv.sharding.split import Split
from tests.equivalence import apart
from tests.nets import Twice, plan_of
from tests.spawn import on_ranks

Params = list[dict[str, Any]]
ALONE = Split("sample", (0, 0, 1, 0))
SPLITS = {  # by number of ranks; of four, one holds no weight
    4: {
        "one": Split("height", (1, 2, 0, 0)),
        "two": Split("width", (0, 1, 1, 0)),
        "head": ALONE,
    },
    3: {
        "one": Split("filter", (4, 0, 2)),
        "two": Split("channel", (1, 5, 0)),
        "head": Split("filter", (0, 1, 2)),
    },
    2: {
        "one": Split("channel", (0, 3)),
        "two": Split("filter", (3, 1)),
        "head": Split("channel", (50, 14)),
    },
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, 0.05, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, 1e-2, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, 1e-2),
}


class Net(nn.Module):
    """Convolutions, a linear, a norm with running statistics, and a parameter that is
    not trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(3, 6, 3, padding=1),
            nn.Conv2d(6, 4, 3, stride=2, padding=1),
        )
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(64, 3)
        self.two.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.two(F.relu(self.norm(self.one(x)))).flatten(1))
        return y


def plain(seed: int) -> Net:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    return Net()


def split(world: int, seed: int, group: Any = None) -> nn.Module:
    net = plain(seed)
    return hetconv.parallelize(net, plan_of(net, SPLITS[world], world), group=group)


def optimizer_of(model: nn.Module, kind: str) -> Optimizer:
    """Two groups, in another order than the model's parameters, the second of which decays."""
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for k, p in named.items() if ("weight" in k) == big]}
        for big in (False, True)
    ]
    made: Optimizer = OPTIMIZERS[kind](
        [groups[0], groups[1] | {"weight_decay": 0.1, "lr": 0.02}]
    )
    return made


def fresh(model: nn.Module, kind: str) -> Optimizer:
    """One that has other rates, and learns the right ones from a state."""
    optimizer = optimizer_of(model, kind)
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    return optimizer


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for i in steps:
        x = torch.randn(
            2, 3, 8, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64
        )
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def trained(model: nn.Module, kind: str, steps: int) -> tuple[nn.Module, Optimizer]:
    optimizer = optimizer_of(model, kind)
    train(model, optimizer, range(steps))
    return model, optimizer


def difference(a: Any, b: Any) -> float:
    """The largest of any two tensors in states of the same structure; infinite where
    anything else differs.
    """
    if isinstance(a, Tensor):
        return apart(a, b)
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return max((difference(a[k], b[k]) for k in a), default=0.0)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max(map(difference, a, b), default=0.0)
    return 0.0 if a == b else float("inf")


def given(world: int, kind: str, steps: int) -> Any:
    model, optimizer = trained(split(world, 0), kind, steps)
    return hetconv.full_state_dict(model), hetconv.full_optim_state_dict(
        model, optimizer
    )


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_the_whole_state_of_an_optimizer_is_the_unsplit_ones(
    world: int, kind: str, steps: int
) -> None:
    """As torch.distributed.checkpoint gives it of the unsplit model."""
    net, optimizer = trained(plain(0), kind, steps)
    expected = get_optimizer_state_dict(net, optimizer) | (
        {} if steps else {"state": {}}
    )  # torch makes a step
    for state, optim in on_ranks(world, given, world, kind, steps):
        assert difference(state, dict(net.state_dict())) <= 1e-9
        assert difference(optim, expected) <= 1e-9


def going_on(world: int, kind: str, state: Any, optim: Any) -> Any:
    model = split(world, 1)
    optimizer = fresh(model, kind)
    hetconv.load_full_state_dict(model, state)
    hetconv.load_full_optim_state_dict(model, optimizer, optim)
    train(model, optimizer, range(2, 4))
    return hetconv.full_state_dict(model)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_plain_run_goes_on_split(kind: str) -> None:
    net, optimizer = trained(plain(0), kind, 2)
    state, by_position, by_name = (
        dict(net.state_dict()),
        optimizer.state_dict(),
        get_optimizer_state_dict(net, optimizer),
    )
    found = [
        on_ranks(2, going_on, 2, kind, state, optim)[0]
        for optim in (by_position, by_name)
    ]
    train(net, optimizer, range(2, 4))
    for there in found:
        assert difference(there, dict(net.state_dict())) <= 1e-9


@pytest.mark.parametrize("how", ["hetconv", "torch"])
def test_a_split_run_goes_on_plain(how: str, tmp_path: Path) -> None:
    torch.save(on_ranks(3, given, 3, "adam", 2)[1], tmp_path / "state")
    state, optim = torch.load(tmp_path / "state")
    net = plain(1)
    optimizer = fresh(net, "adam")
    net.load_state_dict(state)
    if how == "hetconv":
        hetconv.load_full_optim_state_dict(net, optimizer, optim)
    else:
        optim["state"][
            "two.bias"
        ] = {}  # torch misses a state of a parameter that has none: it is not trained
        set_optimizer_state_dict(net, optimizer, optim)
    train(net, optimizer, range(2, 4))
    assert (
        difference(
            dict(net.state_dict()), dict(trained(plain(0), "adam", 4)[0].state_dict())
        )
        <= 1e-9
    )


def its_own(world: int) -> tuple[bool, bool]:
    """Whether what was loaded is a copy, in the memory format of the weights."""
    model = split(world, 0).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = trained(model, "adam", 1)[1]
    state = hetconv.full_optim_state_dict(model, optimizer)
    hetconv.load_full_optim_state_dict(model, optimizer, state)
    pairs = [(p, kept["exp_avg"]) for p, kept in optimizer.state.items()]
    given = {
        x["exp_avg"].data_ptr() for x in state["state"].values() if x["exp_avg"].numel()
    }
    return (
        not any(x.data_ptr() in given for _, x in pairs),
        all(p.stride() == x.stride() for p, x in pairs if p.numel()),
    )


def test_what_is_loaded_is_a_copy_in_the_weights_memory_format() -> None:
    assert on_ranks(2, its_own, 2) == [(True, True)] * 2


def told(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except hetconv.HetConvError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


class RowMeans(torch.optim.SGD):
    """Keeps one number per filter."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["rows"] = p.detach().flatten(1).mean(1)


class History(torch.optim.SGD):
    """Keeps a list of flat tensors."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["directions"] = [p.detach().flatten()]


def refused() -> dict[str, str]:
    model, optimizer = trained(split(2, 0), "adam", 1)
    rank = torch.distributed.get_rank()
    whole = hetconv.full_optim_state_dict(model, optimizer)
    before = hetconv.full_optim_state_dict(model, optimizer)
    model_state = hetconv.full_state_dict(model)

    def changed(**entries: Any) -> Any:
        return whole | (entries if rank == 1 else {})

    def load(state: Any) -> str:
        return told(hetconv.load_full_optim_state_dict, model, optimizer, state)

    wrong = {
        "state": whole["state"] | {"one.weight": {"exp_avg": torch.zeros(6, 3, 3, 2)}}
    }
    found = {
        "shape": load(changed(**wrong)),
        "groups": load(changed(param_groups=whole["param_groups"][:1])),
        "group": load(changed(param_groups=whole["param_groups"][::-1])),
        "unknown": load(changed(state=whole["state"] | {"three.weight": {}})),
        "values": load(
            changed(
                state={
                    k: {j: x + 1 for j, x in v.items()}
                    for k, v in whole["state"].items()
                }
            )
        ),
        "values of the model": told(
            hetconv.load_full_state_dict,
            model,
            {k: v + rank for k, v in model_state.items()},
        ),
        "type": load(None if rank == 1 else whole),
        "strangers": told(
            hetconv.full_optim_state_dict, model, optimizer_of(plain(0), "sgd")
        ),
    }
    for kind in (RowMeans, History):
        odd: Any = kind([model.two.weight], lr=1e-3)
        odd.step()
        found[kind.__name__] = told(hetconv.full_optim_state_dict, model, odd)
    found["after"] = str(
        difference(hetconv.full_optim_state_dict(model, optimizer), before)
    )
    return found


def test_what_does_not_fit_is_refused_by_name_on_every_rank() -> None:
    first, second = on_ranks(2, refused)
    assert first == second
    expected = {
        "shape": [
            "HetConvError",
            "on rank 1",
            "'one.weight'",
            "(6, 3, 3, 2)",
            "(6, 3, 3, 3)",
        ],
        "groups": [
            "HetConvError",
            "on rank 1",
            "1 groups",
            "expected 2",
            "group 1: missing ['head.weight'",
        ],
        "group": [
            "HetConvError",
            "on rank 1",
            "group 0: missing ['head.bias'",
            "unknown ['head.weight'",
        ],
        "unknown": ["HetConvError", "on rank 1", "three.weight"],
        "values": ["DisagreementError", "bytes"],
        "values of the model": ["DisagreementError", "bytes"],
        "type": ["HetConvError", "on rank 1", "NoneType"],
        "strangers": ["HetConvError", "not the model's", "after hetconv.parallelize"],
        "RowMeans": ["HetConvError", "RowMeans", "'two.weight'"],
        "History": ["HetConvError", "History", "'two.weight'"],
        "after": ["0.0"],
    }
    assert first.keys() == expected.keys()
    for how, words in expected.items():
        assert all(word in first[how] for word in words), first[how]


class Counting(nn.Module):
    """A module whose state is more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.seen = nn.Conv2d(2, 4, 3), {"runs": 3}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def more_than_tensors() -> Any:
    net = Counting()
    hetconv.parallelize(net, plan_of(net, {"conv": Split("filter", (3, 1))}, 2))
    state = hetconv.full_state_dict(net)
    hetconv.load_full_state_dict(net, state | {"_extra_state": {"runs": 5}})
    return state["_extra_state"], net.seen


def test_a_state_may_hold_more_than_tensors() -> None:
    assert on_ranks(2, more_than_tensors) == [({"runs": 3}, {"runs": 5})] * 2


class Tied(Twice):
    """Two convolutions, each under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = self.whole_again = nn.Conv2d(4, 4, 3)


def through_safetensors(path: Path) -> float:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    net: Any = Tied().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    expected = {k: v.clone() for k, v in net.state_dict().items()}
    hetconv.parallelize(net, plan_of(net, {"conv": Split("filter", (1, 3))}, 2))
    state = hetconv.full_state_dict(net)
    if torch.distributed.get_rank() == 0:
        save_file(state, path)
    torch.distributed.barrier()
    with torch.no_grad():
        net.conv.weight.zero_()
    hetconv.load_full_state_dict(net, load_file(path))
    return max(
        difference(load_file(path), expected),
        difference(hetconv.full_state_dict(net), expected),
    )


def test_safetensors_takes_and_gives_the_whole_state(tmp_path: Path) -> None:
    """Of a model in channels-last with layers under two names: safetensors refuses both
    in a plain state.
    """
    assert on_ranks(2, through_safetensors, tmp_path / "model.safetensors") == [
        0.0,
        0.0,
    ]
