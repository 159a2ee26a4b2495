"""Files that are written at once: a reader finds the old content or the new one."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from hetconv.errors import OutputError

_umask = os.umask(0o022)  # there is no way to read it but to set it
os.umask(_umask)


def check_output(path: str | Path) -> Path:
    """Refuses a path to which no file can be written, before any work for it is done.

    Args:
        path: File to write later. It may exist already, or be a symbolic link to a file.

    Returns:
        The file itself, as an absolute path without symbolic links.

    Raises:
        OutputError: The path is a folder or a device, a folder above it is a file, or this
            user may not write there.
    """
    target = _regular(path)
    folder = next(parent for parent in target.parents if parent.exists())
    try:
        # os.access is not enough: it promises root what some file systems refuse.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        raise OutputError(
            f"{path} cannot be written: {e.strerror or e} in {folder}; name a file elsewhere"
        ) from e
    return target


def write(path: str | Path, content: bytes) -> None:
    """Replaces a file at once, so that no reader ever finds half of it.

    A symbolic link stays one: the file that it leads to is replaced. A new file has the
    permissions that the process's umask leaves, an existing one keeps its own.

    Args:
        path: File to write; its folder is made if there is none.
        content: Bytes to write.

    Raises:
        OutputError: The file cannot be written; what was there before is unchanged.
    """
    target = _regular(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name}."
        )
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(content)
            os.chmod(temporary, _mode(target))
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as e:
        raise OutputError(
            f"{path} cannot be written: {e.strerror or e}; free some space, or name a file "
            "elsewhere. What was there before is unchanged"
        ) from e


def _regular(path: str | Path) -> Path:
    """Returns the file that a path leads to; refuses what is not a file to be replaced."""
    target = Path(path).resolve()
    if target.is_dir():
        raise OutputError(f"{path} is a folder; name a file in it")
    if target.exists() and not target.is_file():
        raise OutputError(
            f"{path} is not a regular file, and would be replaced by one; name another"
        )
    if target.exists() and not os.access(target, os.W_OK):
        raise OutputError(f"{path} is read-only; name another file, or permit writing")
    return target


def _mode(path: Path) -> int:
    """Returns the permissions of a file that replaces this one."""
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~_umask
