"""What the integrations ask of models that were handed to a library."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from hetconv.errors import HetConvError
from hetconv.nn.gradients import GradScaler
from hetconv.nn.parameters import group_of_model


def check_spans(model: nn.Module, world: int) -> None:
    """Raises `HetConvError` if a model is split over some of the ranks only.

    Args:
        model: A plain or parallelized model.
        world: Number of all ranks.
    """
    group = group_of_model(model)
    if group is None or group.size == world:
        return
    if group.size > world:
        raise HetConvError(
            f"the model is split over {group.size} ranks, but the library counts {world}; on "
            "CPUs give accelerate's Accelerator cpu=True, and TrainingArguments use_cpu=True"
        )
    raise HetConvError(
        f"the model is split over {group.size} of {world} ranks, but all of them would get the "
        "same batches here; split it over all ranks, or train replicas of it with "
        "DistributedDataParallel itself"
    )


def model_of(models: Iterable[nn.Module], optimizer: Optimizer) -> nn.Module:
    """Returns the model whose parameters an optimizer has.

    Args:
        models: Models that were handed to the library.
        optimizer: An optimizer of some or all parameters of one of them.

    Raises:
        HetConvError: None of them has all of its parameters.
    """
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in models:
        if own <= {id(p) for p in model.parameters()}:
            return model
    raise HetConvError(
        f"the {len(own)} parameters of a {type(optimizer).__name__} are not those of one model "
        "that was set up; set up the model too, and give each an optimizer of its own"
    )


def scaler_of(
    model: nn.Module, device: torch.device, scaler: torch.amp.GradScaler
) -> torch.amp.GradScaler:
    """Returns a scaler for a model, with the options of the one that a library made.

    Args:
        model: A plain or parallelized model.
        device: Its device.
        scaler: What the library would use.
    """
    if group_of_model(model) is None:
        return scaler
    return GradScaler(
        model,
        device.type,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )
