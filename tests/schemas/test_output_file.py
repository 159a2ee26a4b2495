"""Files are written at once, with the usual permissions, or refused before the work."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import hetconv
from hetconv.schemas.output_file import check_output, write


def test_a_symbolic_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    write(link, b"new")
    assert link.is_symlink()
    assert file.read_text() == "new"


def test_a_link_to_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write(tmp_path / "link", b"new")
    assert (tmp_path / "file").read_text() == "new"


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    write(tmp_path / "new", b"")
    assert _mode(tmp_path / "new") == _mode(tmp_path / "usual")


def test_an_existing_file_keeps_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o600)
    write(tmp_path / "file", b"new")
    assert _mode(tmp_path / "file") == 0o600


def test_folders_are_made(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "file", b"new")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"new"


@pytest.mark.parametrize("use", [check_output, lambda path: write(path, b"")])
def test_a_device_is_refused_and_stays(tmp_path: Path, use) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(hetconv.OutputError, match="not a regular file"):
        use(pipe)
    assert pipe.is_fifo()


def test_checking_leaves_nothing(tmp_path: Path) -> None:
    check_output(tmp_path / "a" / "file")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hetconv.OutputError, match="is a folder; name a file in it"):
        check_output(tmp_path)


def test_a_file_as_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(hetconv.OutputError, match="Not a directory"):
        check_output(tmp_path / "file" / "below")


def test_where_nobody_may_write_it_is_refused() -> None:
    with pytest.raises(hetconv.OutputError, match="cannot be written"):
        check_output("/proc/hetconv.json")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_told_and_the_old_content_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    real = os.fdopen
    monkeypatch.setattr(os, "fdopen", lambda handle, mode: _full(real(handle, mode)))
    with pytest.raises(hetconv.OutputError, match="No space left on device"):
        write(file, b"new")
    assert [f.name for f in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "old"


def _full(file):
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file.fileno())
    os.close(full)
    return file


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
