"""Split models under Hugging Face's accelerate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hetconv.errors import HetConvError
from hetconv.nn.gradients import clip_grad_norm_
from hetconv.nn.optimizer_state import (
    load_full_optim_state_dict,
    numbered_optim_state_dict,
)
from hetconv.nn.state_dict import full_state_dict
from hetconv.runtime.batches import same_batches

from .models import check_spans, model_of, scaler_of

try:
    import accelerate
except ImportError as e:
    raise ImportError(
        "hetconv.integrations.accelerate needs accelerate: pip install accelerate"
    ) from e


class Accelerator(accelerate.Accelerator):
    """An accelerator whose processes train one split model together.

    accelerate's own makes a replica of each process: it wraps models in
    `DistributedDataParallel`, gives each process batches of its own, and saves the state of
    process 0. This one leaves models as they are, gives all processes the batches of process
    0, clips by norms of whole gradients, and saves the states of plain models. What it saves
    loads without hetconv, and under any plan.

    It counts as one process: ``num_processes`` is 1, and what is gathered for metrics is what
    was given. Each of ``clip_grad_norm_``, ``get_state_dict``, ``save_state``, ``load_state``,
    ``save_model`` and an optimizer's ``state_dict`` is collective: call it on all processes.

    Example:
        >>> accelerator = Accelerator()
        >>> model = hetconv.parallelize(model.to(accelerator.device), plan)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    scaler: Any
    num_processes = 1
    dispatch_batches = False  # which would cut each batch
    split_batches = True  # a batch is as large as on one process: schedulers step once

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Prepares a split or a plain model, which is then the same on all processes."""
        check_spans(model, self.state.num_processes)
        if self.scaler is not None:
            self.scaler = scaler_of(model, self.device, self.scaler)
            for optimizer in self._optimizers:
                optimizer.scaler = self.scaler
        # In this mode it does all but to wrap the model.
        prepared: nn.Module = super().prepare_model(model, device_placement, True)
        return prepared

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares a loader that yields the batches of process 0 on all processes."""
        loader = super().prepare_data_loader(*args, **kwargs)
        if self.state.num_processes > 1:
            loader.base_dataloader = same_batches(loader.base_dataloader)
        return loader

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Prepares an optimizer whose state is that of the plain model's."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        inner = prepared.optimizer
        prepared.state_dict = lambda: numbered_optim_state_dict(
            model_of(self._models, inner), inner
        )
        prepared.load_state_dict = lambda state: load_full_optim_state_dict(
            model_of(self._models, inner), inner, state
        )
        return prepared

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clips the gradients of a prepared model, or of one of its modules; collective."""
        self.unscale_gradients()
        return clip_grad_norm_(self._module_of([*parameters]), max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns the state of the plain model; collective."""
        return full_state_dict(self.unwrap_model(model) if unwrap else model)

    def gather(self, tensor: Any) -> Any:
        """Returns what it is given: no other process has other outputs."""
        return tensor

    def gather_for_metrics(
        self, input_data: Any, use_gather_object: bool = False
    ) -> Any:
        """Returns what it is given: no other process has other outputs."""
        return input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Returns what it is given: no other process has other outputs."""
        return tensor

    def _module_of(self, parameters: Iterable[Tensor]) -> nn.Module:
        """Returns the prepared model, or its module, that has just these gradients."""
        wanted = {id(p) for p in parameters if p.grad is not None}
        for model in self._models:
            for module in model.modules():
                if wanted == {id(p) for p in module.parameters() if p.grad is not None}:
                    return module  # type: ignore[no-any-return]
        raise HetConvError(
            f"these {len(wanted)} parameters with gradients are not all those of a prepared "
            "model, or of a module of it, whose slices hetconv knows; give model.parameters()"
        )
