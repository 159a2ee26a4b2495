"""What the calling process and a worker tell each other."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from hetconv.errors import HetConvError, LostRankError
from hetconv.schemas.plan import Plan
from hetconv.schemas.provenance import DeviceIdentity
from hetconv.torch_internals import ExceptionWrapper

from .transport import Packed


@dataclass(frozen=True)
class Load:
    """Have a model, and split it.

    Attributes:
        key: Number of the model.
        model: The model.
        plan: How it is split.
        fuse: Option of `hetconv.parallelize`.
        graphs: Likewise.
        main: What `import_main` takes; None if the model does not need the main module.
    """

    key: int
    model: Packed
    plan: Plan
    fuse: bool
    graphs: bool
    main: dict[str, Any] | None


@dataclass(frozen=True)
class Call:
    """Call a model without gradients.

    Attributes:
        key: Number of the model.
        arguments: Positional and keyword arguments.
        training: Whether the model is in training mode.
        autocast: Data type of autocast; None where it is off.
        main: As that of `Load`.
        unused: Numbers of models that are not needed any more.
    """

    key: int
    arguments: Packed
    training: bool
    autocast: torch.dtype | None
    main: dict[str, Any] | None
    unused: tuple[int, ...]


@dataclass(frozen=True)
class Failure:
    """An error of a worker.

    Attributes:
        error: The error and its traceback.
        text: The text alone, of an error of hetconv's own, which says all there is to say.
        places: The lines of code that were running, from the worker's own to the error's.
        in_step: Whether no other worker can be waiting for a message of the call.
        lost: Whether the process group cannot be used any more.
    """

    error: ExceptionWrapper
    text: str | None
    places: tuple[tuple[str, int | None], ...]
    in_step: bool
    lost: bool

    @staticmethod
    def of(error: BaseException, where: str, *, in_step: bool = False) -> Failure:
        """Returns what there is to say about an error that is being handled.

        Args:
            error: The error.
            where: Which worker this is, in the message.
            in_step: Whether the call was over.
        """
        wrapped = ExceptionWrapper(where=where)
        try:
            pickle.dumps(wrapped)
        except Exception:  # of a class that is defined within a function
            wrapped.exc_type = RuntimeError
        if not isinstance(error, Exception):  # it would end the caller, too
            wrapped.exc_type = RuntimeError
        own, lost = isinstance(error, HetConvError), isinstance(error, LostRankError)
        stack = traceback.extract_tb(error.__traceback__)
        places = tuple((frame.filename, frame.lineno) for frame in stack)
        return Failure(wrapped, str(error) if own else None, places, in_step, lost)

    def is_alike(self, other: Failure) -> bool:
        """Tells whether another worker failed in the same place: no message is under way."""
        kinds = {self.error.exc_type.__name__, other.error.exc_type.__name__}
        return len(kinds) == 1 and self.places == other.places

    def to_error(self, note: str = "") -> Exception:
        """Returns the error for the calling process.

        Args:
            note: Goes to the end of its message.
        """
        error: Exception
        if self.text is not None:
            error = self.error.exc_type(self.text + note)
            error.add_note(self.error.exc_msg.rstrip())
            return error
        self.error.exc_msg += note
        try:
            self.error.reraise()
        except Exception as e:
            error = e.with_traceback(None)
        return error


@dataclass(frozen=True)
class Answer:
    """What a worker answers to a request.

    Attributes:
        value: The result of a call, from rank 0. At the start, this worker's device.
        failure: What went wrong instead.
    """

    value: Packed | DeviceIdentity | None = None
    failure: Failure | None = None
