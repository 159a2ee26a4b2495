"""What a tuning job has measured so far, for one writer.

It is on disk from the moment it is known: the job's own records and, unless another
database is asked for, its Optuna trials, in one SQLite file beside the profile.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import IO, Any

import optuna
from optuna.storages import RDBStorage

from hetconv.errors import HetConvError

VERSION = 1  # of the records; SQLite's user_version in the file
# How long a process that was just killed may take to be gone.
MAX_LOCK_WAIT_S = 2.0
TITLE, BASELINE = "title", "baseline"  # attributes of a study
JOB = "job"  # the stage under which the file has what was asked for
CREATE = """
CREATE TABLE hetconv_records (
    stage TEXT, key TEXT, value TEXT NOT NULL, PRIMARY KEY (stage, key)
)
"""
INSERT = """
INSERT INTO hetconv_records VALUES (?, ?, ?)
ON CONFLICT (stage, key) DO UPDATE SET value = excluded.value
"""
SELECT = "SELECT stage, key, value FROM hetconv_records ORDER BY rowid"


def journal_of(output: Path) -> Path:
    """Returns the file beside a profile in which its measurements are kept."""
    return output.with_name(f"{output.name}.study.db")


@contextmanager
def claimed(output: Path) -> Iterator[Path]:
    """Holds the journal of a profile for this process alone.

    The system ends the claim with the process.

    Args:
        output: the profile.

    Yields:
        The file of the journal, which need not exist.

    Raises:
        HetConvError: if another process holds it.
    """
    journal = journal_of(output)
    journal.parent.mkdir(parents=True, exist_ok=True)
    # Not the journal itself: whoever closes a file ends SQLite's own locks on it.
    with open(journal.with_suffix(".lock"), "a+", encoding="utf-8") as lock:
        _lock(lock, output)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        # Left by a process that was killed while it wrote.
        for torn in output.parent.glob(f".{escape(output.name)}.*"):
            torn.unlink()
        yield journal


def _lock(lock: IO[str], output: Path) -> None:
    latest = time.monotonic() + MAX_LOCK_WAIT_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > latest:
                lock.seek(0)
                raise HetConvError(
                    f"{output} is being written by another hetconv autotune (process "
                    f"{lock.read() or 'unknown'}); wait "
                    "for it, end it, or give another --output"
                ) from None
        time.sleep(0.1)


class Store:
    """The records of one job in a claimed file, and its Optuna studies.

    Args:
        file: the journal.
        job: what was asked for, as JSON has it.
        resume: whether to go on from what the file holds. Otherwise the job begins
            anew, and what the file holds is set aside.
        url: the database of the studies' trials, in place of the file.

    Raises:
        HetConvError: if the file that is to be resumed holds another job's or another
            version's records, or none; or if a database cannot be opened.
    """

    def __init__(
        self,
        file: Path,
        job: Mapping[str, Any],
        *,
        resume: bool,
        url: str | None = None,
    ):
        self._file = file
        if not resume:
            _set_aside(file)
        try:
            self._records = sqlite3.connect(file, isolation_level=None)
            self.known = self._opened()
        except sqlite3.Error as e:
            raise HetConvError(
                f"{file} cannot be read as a journal ({e}); leave out --resume, which "
                "sets it aside"
            ) from e
        self._check(job)
        asked = json.dumps(job, sort_keys=True).encode()
        self._digest = hashlib.sha256(asked).hexdigest()[:16]
        self._trials = _storage(file, url)
        if not resume:
            for name in self._studies():  # in a database
                optuna.delete_study(study_name=name, storage=self._trials)

    def _opened(self) -> dict[tuple[str, str], Any]:
        """Makes the table in a new file; reads what an older one holds."""
        db = self._records
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if not tables:
            db.execute("BEGIN")
            db.execute(CREATE)
            db.execute(f"PRAGMA user_version = {VERSION}")
            db.execute("COMMIT")
        elif version != VERSION:
            raise HetConvError(
                f"{self._file} is another version's (its version is {version}, and "
                f"{VERSION} is known here); leave out --resume, which sets it aside"
            )
        rows = db.execute(SELECT)
        return {(stage, key): json.loads(value) for stage, key, value in rows}

    def _check(self, job: Mapping[str, Any]) -> None:
        there = self.known.pop((JOB, ""), None)
        if there is None:
            self._write(JOB, "", job)
            return
        differences = [
            f"{name} is {there.get(name)} there, {asked} here"
            for name, asked in job.items()
            if there.get(name) != asked
        ]
        if differences:
            raise HetConvError(
                f"--resume: {self._file} holds what was measured for another job: "
                f"{'; '.join(differences)}. Ask for the "
                "same, give another --output, or leave out --resume, which sets it aside and "
                "begins anew"
            )

    def keep(self, stage: str, key: str, value: Any) -> None:
        """Writes a record, which is on disk when this returns.

        Args:
            stage: of the job.
            key: what the record is of; a later record of the same one replaces it.
            value: as JSON has it.
        """
        self.known[stage, key] = value
        self._write(stage, key, value)

    def _write(self, stage: str, key: str, value: Any) -> None:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        self._records.execute(INSERT, (stage, key, text))

    def close(self) -> None:
        """Closes the databases."""
        self._records.close()
        self._trials.remove_session()
        self._trials.engine.dispose()

    def of_stage(self, stage: str) -> dict[str, Any]:
        """Returns the records of a stage by key, in the order in which they were first kept."""
        return {key: value for (of, key), value in self.known.items() if of == stage}

    def study(self, title: str, baseline: str) -> optuna.Study:
        """Opens an Optuna study of the job, with the trials that it has had.

        Args:
            title: what tells it from the job's other studies.
            baseline: what its values are relative to.
        """
        study = optuna.create_study(
            study_name=f"{self._digest} {title}",
            storage=self._trials,
            load_if_exists=True,
        )
        study.set_user_attr(TITLE, title)
        study.set_user_attr(BASELINE, baseline)
        return study

    def studies(self) -> list[optuna.Study]:
        """Opens all studies that the job has had, in the order in which they began."""
        return [
            optuna.load_study(study_name=name, storage=self._trials)
            for name in self._studies()
        ]

    def _studies(self) -> list[str]:
        names: list[str] = optuna.get_all_study_names(self._trials)
        return [name for name in names if name.startswith(f"{self._digest} ")]


def _set_aside(file: Path) -> None:
    """Renames a database with what a killed process has left of it in other files."""
    for suffix in ("", "-wal", "-shm"):
        part, aside = Path(f"{file}{suffix}"), Path(f"{file}.before{suffix}")
        aside.unlink(missing_ok=True)
        if part.exists():
            part.rename(aside)


def _storage(file: Path, url: str | None) -> RDBStorage:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        return RDBStorage(url or f"sqlite:///{file}")
    except Exception as e:  # the driver's own, of whichever database it is
        why = str(e).strip().partition("\n")[0]
        raise HetConvError(
            f"--storage: {why or type(e).__name__}; give sqlite:///FILE, or "
            "postgresql://USER@HOST/NAME with its driver installed"
        ) from e
