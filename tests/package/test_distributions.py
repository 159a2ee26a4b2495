"""What is built and installed: a wheel, from a source distribution, in a new environment."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import hetconv

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        # The checkout must not be found in place of what is installed.
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd), "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a copy of what git tracks, as a build leaves files beside the source."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    files = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    tracked = [
        f for f in files if f and (ROOT / f).exists() and not f.startswith("bench/")
    ]
    run("cp", "--parents", "--no-dereference", *tracked, source, cwd=ROOT)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=source)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_has_every_module_and_data_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        built = {n for n in archive.namelist() if n.startswith("hetconv/")}
    at_root = {
        f"hetconv/{path.relative_to(ROOT)}"
        for name in ("autotune", "kernels")
        for path in (ROOT / name).rglob("*")
    }
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "hetconv").rglob("*")}
    wanted = {
        name
        for name in at_root | own
        if (ROOT / name).is_file() and "__pycache__" not in name
    }
    assert built == wanted


def test_the_wheel_runs_in_a_new_environment(wheel: Path, tmp_path: Path) -> None:
    """With the dependencies of this one, whose editable install it does not see."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    run(
        sys.executable, "-m", "pip", "--python", python,
        "install", "-q", "--no-deps", "--no-index", wheel, cwd=tmp_path,
    )  # fmt: skip
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    where = run(python, "-c", "import hetconv; print(hetconv.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(packages)
    command = tmp_path / "venv" / "bin" / "hetconv"
    assert run(command, "--version", cwd=tmp_path) == f"hetconv {hetconv.__version__}\n"
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Conv2d(3, 64, 3)\n"
    )
    options = ("--devices", "2xT4", "--model", "net.py:net", "--input", "1x3x64x64")
    assert "wrote plan.json" in run(command, "plan", *options, cwd=tmp_path)
    assert run(
        python, "-c", "import hetconv; print(hetconv.parallelize, hetconv.kernels)",
        cwd=tmp_path,
    )  # fmt: skip


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {hetconv.__version__}\n" in (ROOT / "CITATION.cff").read_text()
