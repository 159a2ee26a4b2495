"""Files that matplotlib draws. It is loaded when a figure is asked for, and only then needs to be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from hetconv.errors import HetConvError
from hetconv.schemas.json_files import write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")
INK = "#333333"


@contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches to draw on; afterwards it is in the file, whole, unless an error was raised.

    Raises `HetConvError` for a file of no known format, and without matplotlib.
    """
    if path.suffix not in FORMATS:
        raise HetConvError(f"a picture cannot be written as {path.name!r}; name it *{', *'.join(FORMATS)}")
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context({"font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK}):
        drawn = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.05))
        yield drawn
        content = BytesIO()
        drawn.savefig(content, format=path.suffix[1:], dpi=110)
    write(path, content.getvalue())


def prepare(folder: Path) -> None:
    """So that nothing stands in the way of figures in a folder. Raises `HetConvError` if something does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise HetConvError(f"no picture can be written to {folder} ({e.strerror}); give another folder") from e
    require_matplotlib()


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise HetConvError(f"a picture needs matplotlib ({e}); install it with pip install matplotlib") from e
