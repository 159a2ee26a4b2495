"""Errors that the user's own code raised, told by its last line."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import torch

from hetconv.errors import HetConvError

_OURS = Path(__file__).resolve().parents[2]
_TORCH = Path(torch.nn.__path__[0]).resolve().parent
_STANDARD = Path(sysconfig.get_path("stdlib")).resolve()


class UserCodeError(HetConvError):
    """What a model, or a callable that the user named, raised: raise it from that."""

    def __init__(self, what: str, error: BaseException):
        super().__init__(f"{what}: {told(error)}")


def told(error: BaseException) -> str:
    """Says what was raised, and by which line of the user's code.

    Args:
        error: what was raised.

    Returns:
        The last line of the traceback that lies neither in hetconv, PyTorch nor the
        standard library, and in no installed package if there is such a line.
    """
    said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if isinstance(error, SyntaxError):
        return said
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f)]
    own = [f for f in frames if "site-packages" not in Path(f.filename).parts]
    if not frames:
        return said
    frame = (own or frames)[-1]
    return f"{_short(frame.filename)}, line {frame.lineno}, in {frame.name}: {frame.line}: {said}"


def _is_users(frame: traceback.FrameSummary) -> bool:
    if frame.filename.startswith("<"):  # importlib's own
        return False
    file = Path(frame.filename).resolve()
    if "site-packages" in file.parts:
        return not file.is_relative_to(_TORCH) and not _is_ours(file)
    return not file.is_relative_to(_STANDARD) and not _is_ours(file)


def _is_ours(file: Path) -> bool:
    packages = ("hetconv", "autotune", "kernels")
    return any(file.is_relative_to(_OURS / package) for package in packages)


def _short(file: str) -> str:
    path = Path(file)
    return str(
        path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    )
