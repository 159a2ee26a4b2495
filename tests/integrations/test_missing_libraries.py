"""An integration whose library is not installed says which one it is."""

import sys
from importlib import import_module
from unittest import mock

import pytest

LIBRARIES = {
    "accelerate": ("accelerate", "accelerate"),
    "fabric": ("lightning", "lightning.fabric.strategies"),
    "transformers": ("transformers", "transformers"),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_named(name: str) -> None:
    package, imported = LIBRARIES[name]
    with mock.patch.dict(sys.modules, {imported: None}):
        sys.modules.pop(f"hetconv.integrations.{name}", None)
        with pytest.raises(ImportError, match=f"pip install {package}"):
            import_module(f"hetconv.integrations.{name}")
