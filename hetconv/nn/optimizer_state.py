"""States of a parallelized model's optimizer, with the names and shapes of the plain model."""

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
    """Gathers an optimizer's state on every rank; collective.

    Args:
        model: The parallelized model.
        optimizer: Its optimizer.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}``, in
        the format of `get_optimizer_state_dict` and `set_optimizer_state_dict` in
        torch.distributed.checkpoint.state_dict.

    Raises:
        HetConvError: On every rank, if a parameter is not the model's, or if the state
            of a slice holds a tensor that is neither a number nor of the slice's shape.
    """
    state = agreed(
        model,
        "full_optim_state_dict",
        lambda: sharded_optim_state_dict(model, optimizer),
        signature,
    )
    return whole(state)


def numbered_optim_state_dict(model: nn.Module, optimizer: Optimizer) -> State:
    """Returns the state as ``state_dict`` of the plain model's optimizer does; collective.

    Args:
        model: The parallelized model.
        optimizer: Its optimizer.

    Raises:
        HetConvError: As `full_optim_state_dict` does.
    """
    state = full_optim_state_dict(model, optimizer)
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    return {
        "state": {number[name]: kept for name, kept in state["state"].items()},
        "param_groups": [
            g | {"params": [number[name] for name in g["params"]]}
            for g in state["param_groups"]
        ],
    }


def load_full_optim_state_dict(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Loads the state of a plain model's optimizer; collective.

    Args:
        model: The parallelized model.
        optimizer: Its optimizer, which may have made no step yet.
        state: What `full_optim_state_dict`, or ``state_dict`` of the plain model's
            optimizer, returned.

    Raises:
        HetConvError: On every rank, before anything changes, if names, shapes or groups
            of parameters do not fit on some rank.
        DisagreementError: On every rank, if ranks were given different values.
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
    """Returns the state by names, with HetTensors as in `sharded_state_dict`; local.

    The tensors share the optimizer's memory.
    """
    params, sharded = _params_of(model, optimizer), shares(model)
    own, names = optimizer.state_dict(), list(params)
    if other := own["state"].keys() - set(range(len(names))):
        raise HetConvError(
            f"{type(optimizer).__name__} keeps state of no parameter, under "
            f"{sorted(map(str, other))}"
        )

    def wrap(name: str, x: Tensor) -> Tensor:
        _check(name, x, params[name].shape, optimizer, bool(sharded))
        return sharded[name].owned(x) if name in sharded and x.dim() else x

    by_name = {names[i]: own["state"][i] for i in sorted(own["state"])}
    return {
        "state": {
            name: tree_map_only(Tensor, partial(wrap, name), kept)
            for name, kept in by_name.items()
        },
        "param_groups": [
            g | {"params": [names[i] for i in g["params"]]} for g in own["param_groups"]
        ],
    }


def local_optim_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> State:
    """Returns what this rank's optimizer loads.

    Args:
        model: The parallelized model.
        optimizer: Its optimizer.
        state: A state of whole tensors or of `Slice`, by name or by number.

    Raises:
        HetConvError: The state does not fit the optimizer.
    """
    params, sharded = _params_of(model, optimizer), shares(model)
    # A plain optimizer numbers its parameters.
    names = dict(enumerate(params)) | {name: name for name in params}
    groups = [
        [names.get(p, str(p)) for p in group["params"]]
        for group in state["param_groups"]
    ]
    _check_names(
        groups, [names.get(k, str(k)) for k in state["state"]], optimizer, params
    )

    def own(name: str, x: Tensor) -> Tensor:
        param, share = params[name], sharded.get(name)
        shape = share.held.shape if share is not None else param.shape
        _check(name, x, shape, optimizer, bool(sharded))
        if not x.dim():
            return x.clone()
        mine = share.of(x) if share is not None else x
        # Memory format and device are the parameter's.
        like = param if mine.shape == param.shape else mine
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
    """Checks that a tensor is a number or has its parameter's shape, so that it can be split."""
    if sliced and x.dim() and x.shape != shape:
        raise HetConvError(
            f"{type(optimizer).__name__} keeps a tensor of shape {tuple(x.shape)} for "
            f"{name!r}, but expected is "
            f"{tuple(shape)}, the parameter's, or a number: nothing else can be gathered "
            "from slices"
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
