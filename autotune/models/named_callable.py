"""Callables as named on the command line: of a module, of a file, of a library of models."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from hetconv.errors import HetConvError

from .user_code import UserCodeError

FORMS = "package.module:callable, file.py:callable or, of a library, as in torchvision:resnet50"


def find_callable(target: str, option: str) -> Callable[..., Any]:
    """Imports a callable by its name; the working directory is importable.

    Args:
        target: ``package.module:callable``, ``file.py:callable``, or ``LIBRARY:NAME`` of
            the libraries of `LIBRARIES`.
        option: of the command line, that it was given by.

    Raises:
        HetConvError: if it cannot be imported, saying which part is wrong.
    """
    module_name, colon, name = target.rpartition(":")
    if not colon or not module_name or not name:
        raise HetConvError(
            f"{option} {target!r} does not name a callable; write {FORMS}"
        )
    if module_name in LIBRARIES:
        return LIBRARIES[module_name](_library(module_name, option), name, option)
    if module_name.endswith(".py"):
        module = _module_of_file(Path(module_name), option)
    else:
        module = _module_of_path(module_name, option)
    found = _attribute(module, name, option)
    if not callable(found):
        raise HetConvError(
            f"{option}: {target} is of type {type(found).__name__} and cannot be called; name "
            "a callable"
        )
    made: Callable[..., Any] = found
    return made


def _module_of_path(name: str, option: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except Exception as e:  # whatever the module does when it is imported
        own = (name.partition(".")[0], name)
        if isinstance(e, ModuleNotFoundError) and e.name in own:
            raise HetConvError(
                f"{option}: module {name!r} cannot be imported: {e}; is it installed, or "
                f"below {Path.cwd()}?"
            ) from e
        raise UserCodeError(f"{option}: module {name!r} cannot be imported", e) from e


def _module_of_file(file: Path, option: str) -> ModuleType:
    """Imports a file under its own name, with its folder importable as for a script."""
    if not file.is_file():
        raise HetConvError(
            f"{option}: there is no file {file}, looked for from {Path.cwd()}"
        )
    known = sys.modules.get(file.stem)
    at = file.resolve()
    if known is not None and Path(getattr(known, "__file__", None) or "") == at:
        return known
    spec = importlib.util.spec_from_file_location(file.stem, at)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _make_importable(at.parent)
    # An installed module of this name stays what others import.
    if known is None:
        sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        if known is None:
            del sys.modules[file.stem]
        raise UserCodeError(f"{option}: {file} cannot be imported", e) from e
    return module


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _attribute(module: ModuleType, name: str, option: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError as e:
        raise HetConvError(
            f"{option}: module {module.__name__!r} has no {name!r}{_close(name, dir(module))}"
        ) from e


def _library(name: str, option: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        raise HetConvError(
            f"{option}: {name} is not installed ({e}); install it with pip install {name}"
        ) from e
    except Exception as e:  # such as torchvision's, of another build than torch
        raise HetConvError(
            f"{option}: {name} cannot be imported: {type(e).__name__}: {e}; install the "
            f"{name} that fits torch {torch.__version__}"
        ) from e


def _registered(
    list_models: Callable[[], list[str]], make: Callable[..., Any]
) -> Callable[[str, str, str], Callable[..., Any]]:
    """Finds models that a library makes by their name."""

    def find(library: str, name: str, option: str) -> Callable[..., Any]:
        known = list_models()
        if name.partition(".")[0] not in known:
            raise HetConvError(
                f"{option}: {library} has no model {name!r}{_close(name, known)}"
            )
        return lambda *args, **kwargs: make(name, *args, **kwargs)

    return find


def _of_torchvision(
    torchvision: ModuleType, name: str, option: str
) -> Callable[..., Any]:
    models = torchvision.models
    return _registered(models.list_models, models.get_model)(
        "torchvision", name, option
    )


def _of_timm(timm: ModuleType, name: str, option: str) -> Callable[..., Any]:
    return _registered(timm.list_models, timm.create_model)("timm", name, option)


def _of_diffusers(diffusers: ModuleType, name: str, option: str) -> Callable[..., Any]:
    made: Callable[..., Any] = _attribute(diffusers, name, option)
    return made


def _of_transformers(
    transformers: ModuleType, name: str, option: str
) -> Callable[..., Any]:
    """A model of random weights, by the arguments of its configuration."""
    model = _attribute(transformers, name, option)
    config = getattr(model, "config_class", None)
    if config is None:
        raise HetConvError(
            f"{option}: transformers.{name} is no model with a configuration; name a class "
            "such as ResNetForImageClassification"
        )
    return lambda **kwargs: model(config(**kwargs))


LIBRARIES: Mapping[str, Callable[[ModuleType, str, str], Callable[..., Any]]] = (
    MappingProxyType(
        {
            "diffusers": _of_diffusers,
            "timm": _of_timm,
            "torchvision": _of_torchvision,
            "transformers": _of_transformers,
        }
    )
)


def _close(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, 3, 0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""
