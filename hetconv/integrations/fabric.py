"""Split models under Lightning Fabric."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hetconv.nn.gradients import clip_grad_norm_
from hetconv.nn.optimizer_state import (
    load_full_optim_state_dict,
    numbered_optim_state_dict,
)
from hetconv.nn.state_dict import full_state_dict
from hetconv.runtime.batches import same_batches

from .models import check_spans, model_of, scaler_of

try:
    from lightning.fabric.strategies import DDPStrategy
except ImportError as e:
    raise ImportError(
        "hetconv.integrations.fabric needs Lightning: pip install lightning"
    ) from e


class SplitStrategy(DDPStrategy):
    """A strategy whose processes train one split model together.

    Processes are started, and devices chosen, as for `DDPStrategy`. But models stay as they
    are, all processes get the batches of process 0, gradients are clipped by norms of the
    whole, and what is saved are the states of plain models, which load without hetconv and
    under any plan.

    What is gathered or reduced is what was given. Each of ``fabric.clip_gradients``, ``save``
    and ``load`` is collective: call it on all processes.

    Args:
        options: Options of `DDPStrategy`.

    Example:
        >>> fabric = Fabric(devices=2, strategy=SplitStrategy())
        >>> fabric.launch()
        >>> model = hetconv.parallelize(model.to(fabric.device), plan)
        >>> model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        >>> loader = fabric.setup_dataloaders(loader)
    """

    # Of the loader's own sampler the batches are whole.
    distributed_sampler_kwargs = None

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._models: list[nn.Module] = []
        self._backward_sync_control = None  # that of DDP wants DDP's modules

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Remembers a split or a plain model, which stays as it is."""
        check_spans(module, self.world_size)
        self._models.append(module)
        scaler = getattr(self.precision, "scaler", None)
        if isinstance(scaler, torch.amp.GradScaler):
            self.precision.scaler = scaler_of(module, self.root_device, scaler)
        return module

    def process_dataloader(self, dataloader: Any) -> Any:
        """Makes a loader yield the batches of process 0 on all processes."""
        loader = same_batches(dataloader)
        # Fabric looks for a loader's attributes among those of the object itself.
        vars(loader).update(vars(dataloader) | vars(loader))
        return loader

    def all_gather(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns what it is given: no other process has other outputs."""
        return tensor

    def all_reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Returns what it is given: no other process has other outputs."""
        return tensor

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips the gradients of a model; collective."""
        self.precision.unscale_gradients(optimizer)
        return clip_grad_norm_(module, max_norm, norm_type, error_if_nonfinite)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Returns the state of the plain model; collective."""
        return full_state_dict(module)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the state of the plain model's optimizer; collective."""
        return numbered_optim_state_dict(model_of(self._models, optimizer), optimizer)

    def load_checkpoint(
        self, path: Any, state: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Loads states of plain models and optimizers; collective."""
        if isinstance(state, Optimizer):
            raw = self.checkpoint_io.load_checkpoint(path)
            _OptimizerState(self, state).load_state_dict(raw)
            return {}
        if not isinstance(state, dict):
            rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
            return rest
        given = {
            key: _OptimizerState(self, value) if isinstance(value, Optimizer) else value
            for key, value in state.items()
        }
        rest = super().load_checkpoint(path, given, *args, **kwargs)
        state.update((k, v) for k, v in given.items() if type(v) is not _OptimizerState)
        return rest


class _OptimizerState:
    """What Fabric loads a state of an optimizer into."""

    def __init__(self, strategy: SplitStrategy, optimizer: Optimizer):
        self._strategy, self._optimizer = strategy, optimizer

    def state_dict(self) -> dict[str, Any]:
        return self._strategy.get_optimizer_state(self._optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model = model_of(self._strategy._models, self._optimizer)
        load_full_optim_state_dict(model, self._optimizer, state)
