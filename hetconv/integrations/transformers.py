"""Split models under the Trainer of Hugging Face's transformers."""

from __future__ import annotations

from typing import Any

from torch import nn

from hetconv.errors import HetConvError
from hetconv.nn.state_dict import full_state_dict

from .accelerate import Accelerator

try:
    import transformers
except ImportError as e:
    raise ImportError(
        "hetconv.integrations.transformers needs transformers: pip install transformers"
    ) from e


class TrainingArguments(transformers.TrainingArguments):
    """transformers' arguments, for processes that train one split model together.

    Making them joins the processes that torchrun started.
    """

    world_size = 1  # what a batch on one process is multiplied by


class Trainer(transformers.Trainer):
    """transformers' Trainer, for processes that train one split model together.

    transformers' own makes a replica of each process. This one leaves the model as it is and
    uses an `hetconv.integrations.accelerate.Accelerator`. Its checkpoints are those of a plain
    model: transformers loads them without hetconv, and this one under any plan.

    Args:
        model: A model that `hetconv.parallelize` split over all processes.
        args: The `TrainingArguments` of this module.
        options: Further options of transformers' Trainer.

    Raises:
        HetConvError: ``args`` are transformers' own.

    Example:
        >>> args = TrainingArguments("out")
        >>> model = hetconv.parallelize(model, plan)
        >>> Trainer(model, args, train_dataset=dataset).train()
    """

    def __init__(self, model: nn.Module, args: TrainingArguments, **options: Any):
        if not isinstance(args, TrainingArguments):
            raise HetConvError(
                f"args are {type(args).__module__}.{type(args).__name__}, which count each "
                "process as a replica of the model; give "
                "hetconv.integrations.transformers.TrainingArguments"
            )
        super().__init__(model, args, **options)

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator, which has the options that transformers chose."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator
        self.gather_function = self.accelerator.gather_for_metrics

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Saves the plain model; collective."""
        state = full_state_dict(self.model)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub("Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        collective = self.optimizer.state_dict
        state = collective()
        self.optimizer.state_dict = lambda: state  # process 0 alone asks for it
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer.state_dict = collective

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all processes draw alike
            super()._save_rng_state(output_dir)
