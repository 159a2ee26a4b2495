"""The program's main module, where workers need classes and functions of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import spawn
from typing import Any

from hetconv.errors import HetConvError, few

_importing = False


def how_to_import_main(names: Sequence[str]) -> dict[str, Any] | None:
    """Returns what `import_main` takes; None if nothing of the main module is needed.

    Args:
        names: The names that are needed.

    Raises:
        HetConvError: It cannot be imported, as in a notebook.
    """
    if not names:
        return None
    found = spawn.get_preparation_data("hetconv worker")
    main = {key: found[key] for key in found if key.startswith("init_main")}
    file = main.get("init_main_from_path")
    if not main or (file is not None and not os.path.isfile(file)):  # such as "<stdin>"
        raise HetConvError(
            f"{few(names)} of __main__ cannot be imported by the workers, which are other "
            "processes: code of a notebook or of an interactive session is in no file. Put "
            "it in a file, such as model.py, and import it from there"
        )
    return main | {"sys_argv": found["sys_argv"]}


def import_main(how: dict[str, Any]) -> None:
    """Imports the program's main module, the first time, as `multiprocessing` does."""
    global _importing
    _importing = True
    try:
        spawn.prepare(how)
    finally:
        _importing = False


def refuse_within_import() -> None:
    """Raises `HetConvError` while a worker imports the program's main module."""
    if _importing:
        raise HetConvError(
            "a worker imports the program's main file, because the model is of a class that "
            "is defined there, and the file starts Workers when it is imported. Put what the "
            'program does under `if __name__ == "__main__":`, or define the class in another '
            "file"
        )
