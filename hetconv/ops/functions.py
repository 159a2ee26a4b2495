"""Autograd functions of a user's, and those by which torch checkpoints and hooks modules: they get gathered tensors.

Torch applies them without asking a tensor's class. They would run on parts, without autograd, and a gradient would be
lost without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetconv.comm import call_tags
from hetconv.errors import HetConvError
from hetconv.runtime.het_tensor import HetTensor, compute_waiting
from hetconv.torch_internals import Undo, checkpoint_saver, replace_function_apply


def gather_for_functions(on_gathered: Callable[..., Any]) -> Undo:
    """From now on ``on_gathered`` runs `torch.autograd.Function.apply` where it is given a HetTensor."""

    def apply(cls: type, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if cls is checkpoint_saver or HetTensor not in map(type, args):
            result = plain(*args, **kwargs)
        else:
            call_tags.enter(cls.__name__)
            compute_waiting()  # it may write in place
            result = on_gathered(plain, args, kwargs)
        if torch.is_grad_enabled() and HetTensor in map(type, result if isinstance(result, tuple) else (result,)):
            raise HetConvError(
                f"{cls.__name__} returned a tensor in parts, whose gradient would be lost; return hetconv.gather(y) "
                f"from it, and give torch.utils.checkpoint use_reentrant=False"
            )
        return result

    return replace_function_apply(apply)
