"""The state of an optimizer of a split model, with the names and shapes of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hetconv.errors import HetConvError
from hetconv.sharding.layout import Shape
from hetconv.torch_internals import tree_map_only

from .state_dict import State, agreed, shares, signature, values, whole


def full_optim_state_dict(model: nn.Module, optimizer: Optimizer) -> State:
    """Returns the optimizer's state in the shapes of whole parameters. Collective.

    Args:
        model: a parallelized model.
        optimizer: its optimizer.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}`` on every
        rank, as `get_optimizer_state_dict` of torch.distributed.checkpoint.state_dict returns
        it for an unsplit model, and `set_optimizer_state_dict` takes it.

    Raises:
        HetConvError: a parameter is not the model's, or the optimizer keeps for slices what
            is neither a number nor a slice; on every rank.
    """
    state = agreed(
        model,
        "full_optim_state_dict",
        lambda: sharded_optim_state_dict(model, optimizer),
        signature,
    )
    return whole(state)


def load_full_optim_state_dict(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Loads what `full_optim_state_dict` returned. Collective.

    The ``state_dict`` of an unsplit model's optimizer is loaded as well.

    Args:
        model: a parallelized model.
        optimizer: its optimizer; it may have made no step yet.
        state: the state.

    Raises:
        HetConvError: the state, or its parameter groups, do not fit; on every rank, before
            anything changes.
    """
    what = "load_full_optim_state_dict"
    optimizer.load_state_dict(
        agreed(
            model,
            what,
            lambda: local_optim_state(model, optimizer, state),
            lambda _: values(state),
        )
    )


def sharded_optim_state_dict(model: nn.Module, optimizer: Optimizer) -> State:
    """Returns the state by names, with HetTensors as in `sharded_state_dict`.

    This is local; tensors share the optimizer's memory.
    """
    params, cut, own = (
        _params_of(model, optimizer),
        shares(model),
        optimizer.state_dict(),
    )
    names = list(params)
    if other := own["state"].keys() - set(range(len(names))):
        raise HetConvError(
            f"{type(optimizer).__name__} keeps state of no parameter, under "
            f"{sorted(map(str, other))}"
        )

    def placed(name: str, x: Tensor) -> Tensor:
        _check(name, x, params[name].shape, optimizer, bool(cut))
        return cut[name].owned(x) if name in cut and x.dim() else x

    by_name = {names[i]: own["state"][i] for i in sorted(own["state"])}
    return {
        "state": {
            name: tree_map_only(Tensor, partial(placed, name), kept)
            for name, kept in by_name.items()
        },
        "param_groups": [
            g | {"params": [names[i] for i in g["params"]]} for g in own["param_groups"]
        ],
    }


def local_optim_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> State:
    """Returns what this rank's optimizer takes of a state.

    Args:
        model: a parallelized model.
        optimizer: its optimizer.
        state: a state of whole tensors, or of slices (`Slice`).
    """
    params, cut = _params_of(model, optimizer), shares(model)
    names = dict(enumerate(params)) | {
        name: name for name in params
    }  # a plain optimizer counts its parameters
    groups = [
        [names.get(p, str(p)) for p in group["params"]]
        for group in state["param_groups"]
    ]
    _check_names(
        groups, [names.get(k, str(k)) for k in state["state"]], optimizer, params
    )

    def own(name: str, x: Tensor) -> Tensor:
        _check(
            name,
            x,
            cut[name].held.shape if name in cut else params[name].shape,
            optimizer,
            bool(cut),
        )
        if not x.dim():
            return x.clone()
        mine = cut[name].of(x) if name in cut else x
        like = (
            params[name] if mine.shape == params[name].shape else mine
        )  # for its device and memory format
        return torch.empty_like(like, dtype=mine.dtype).copy_(mine)

    position = {name: i for i, name in enumerate(params)}
    by_name = {names[key]: kept for key, kept in state["state"].items()}
    held = optimizer.state_dict()["param_groups"]
    return {
        "state": {
            position[name]: tree_map_only(Tensor, partial(own, name), kept)
            for name, kept in by_name.items()
        },
        "param_groups": [
            s | {"params": g["params"]}
            for s, g in zip(state["param_groups"], held, strict=True)
        ],
    }


def _params_of(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Returns the optimizer's parameters by name, in its order."""
    names = {id(p): name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if strange := [tuple(p.shape) for p in params if id(p) not in names]:
        raise HetConvError(
            f"the optimizer has {len(strange)} parameters that are not the model's, of shapes "
            f"{strange[:5]}; make it "
            f"from model.parameters() after hetconv.parallelize"
        )
    return {names[id(p)]: p for p in params}


def _check(
    name: str, x: Tensor, shape: Shape, optimizer: Optimizer, sliced: bool
) -> None:
    """Raises `HetConvError` for a state of slices that is no number and not of their shape."""
    if sliced and x.dim() and x.shape != shape:
        raise HetConvError(
            f"{type(optimizer).__name__} keeps a tensor of shape {tuple(x.shape)} for "
            f"{name!r}, but expected is "
            f"{tuple(shape)}, the parameter's, or a number: of nothing else do the parts make "
            "the whole"
        )


def _check_names(
    groups: list[list[str]],
    kept: list[str],
    optimizer: Optimizer,
    params: Mapping[str, Any],
) -> None:
    names = iter(params)
    held = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    wrong = [
        f"group {i}: missing {sorted(set(own) - set(given))}, unknown "
        f"{sorted(set(given) - set(own))}"
        for i, (given, own) in enumerate(zip_longest(groups, held, fillvalue=()))
        if set(given) != set(own)
    ]
    if wrong or len(groups) != len(held) or set(kept) - set(params):
        raise HetConvError(
            f"the state does not fit the optimizer: {len(groups)} groups of parameters, "
            f"expected {len(held)}; "
            f"{'; '.join(wrong)}; values for unknown {sorted(set(kept) - set(params))}"
        )
