"""What a tuning job has measured so far: on disk beside its profile from the moment it
is known, for one writer.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import IO, Any, NamedTuple

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from hetconv.autotune.measure.sampling import Passes
from hetconv.errors import HetConvError
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.json_files import adapter
from hetconv.tracing.graph import Graph

from .study import NAME, WEIGHTS, WHY

FORMAT, VERSION = "hetconv-study", 8
PATIENCE = 2.0  # seconds that a process which was just killed may take to be gone
TITLE, BESIDE = "title", "beside"  # of a study
Document = dict[str, Any]


def folder_of(output: Path) -> Path:
    """Where a profile's studies are kept."""
    return output.with_name(f"{output.name}.study")


@contextmanager
def claimed(output: Path) -> Iterator[Path]:
    """The folder of a profile's studies, for this process alone; the system ends the
    claim with the process.

    Raises `HetConvError` where another process has it.
    """
    folder = folder_of(output)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a+", encoding="utf-8") as lock:
        _lock(lock, output)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        for left in output.parent.glob(
            f".{escape(output.name)}.*"
        ):  # of a process that was killed while it wrote
            left.unlink()
        yield folder


def _lock(lock: IO[str], output: Path) -> None:
    latest = time.monotonic() + PATIENCE
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
    """The records of one job in a claimed folder, and its Optuna studies there or in a database.

    ``job``: what was asked for, as JSON has it. With ``resume`` it goes on from what
    the folder holds, and raises `HetConvError` if that is another job's; otherwise it
    begins anew, and sets aside what the folder holds.
    """

    def __init__(
        self, folder: Path, job: Document, *, resume: bool, url: str | None = None
    ):
        self._file, trials = folder / "measured.jsonl", folder / "trials.journal"
        for file in (self._file, trials):
            if resume:
                _drop_torn_line(file)
            elif file.exists():
                file.replace(f"{file}.before")
        lines = _lines(self._file)
        self._check(lines[0] if lines else None, job)
        self.known: dict[tuple[str, str], Any] = {
            (x["stage"], x["key"]): x["value"] for x in lines[1:]
        }
        self._digest = hashlib.sha256(
            json.dumps(job, sort_keys=True).encode()
        ).hexdigest()[:16]
        self._trials = _storage(trials, url)
        if not resume:
            for name in self._studies():  # in a database
                optuna.delete_study(study_name=name, storage=self._trials)

    def _check(self, head: Document | None, job: Document) -> None:
        if head is None:
            self._append({"format": FORMAT, "version": VERSION, "job": job})
            return
        if (head.get("format"), head.get("version")) != (FORMAT, VERSION):
            raise HetConvError(
                f"{self._file} is another version's; leave out --resume, which sets it aside"
            )
        there = head["job"]
        if differs := [
            f"{k} is {there.get(k)} there, {job.get(k)} here"
            for k in job
            if there.get(k) != job.get(k)
        ]:
            raise HetConvError(
                f"--resume: {self._file} holds what was measured for another job: "
                f"{'; '.join(differs)}. Ask for the "
                "same, give another --output, or leave out --resume, which sets it aside and "
                "begins anew"
            )

    def keep(self, stage: str, key: str, value: Any) -> None:
        """On disk when this returns. ``value`` as JSON has it; a later one under the
        same key counts.
        """
        self.known[stage, key] = value
        self._append({"stage": stage, "key": key, "value": value})

    def _append(self, line: Document) -> None:
        with open(self._file, "ab") as f:
            f.write(
                json.dumps(line, separators=(",", ":"), allow_nan=False).encode()
                + b"\n"
            )
            f.flush()
            os.fsync(f.fileno())

    def study(self, what: str, title: str = "", beside: str = "") -> optuna.Study:
        """The job's Optuna study of this name, with the trials that it has had.

        ``title`` and ``beside``, what its values are relative to, are for whoever looks
        at it later.
        """
        name = f"{self._digest} {what}"
        study = optuna.create_study(
            study_name=name, storage=self._trials, load_if_exists=True
        )
        study.set_user_attr(TITLE, title or what)
        study.set_user_attr(BESIDE, beside)
        return study

    def studies(self) -> list[optuna.Study]:
        """All that the job has had, in the order in which they began."""
        return [
            optuna.load_study(study_name=name, storage=self._trials)
            for name in self._studies()
        ]

    def _studies(self) -> list[str]:
        return [
            name
            for name in optuna.get_all_study_names(self._trials)
            if name.startswith(f"{self._digest} ")
        ]


def _drop_torn_line(file: Path) -> None:
    """What was being appended when the process was killed."""
    if file.exists():
        content = file.read_bytes()
        os.truncate(file, content.rfind(b"\n") + 1)


def _lines(file: Path) -> list[Document]:
    found = []
    for number, line in enumerate(
        file.read_bytes().splitlines() if file.exists() else (), 1
    ):
        try:
            found.append(json.loads(line))
        except ValueError as e:
            raise HetConvError(
                f"{file}: line {number} is not JSON ({e}); leave out --resume, and begin anew"
            ) from e
    return found


class _Unlocked:
    """The folder is claimed, and a lock of optuna's own would be left behind by a
    process that is killed.
    """

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _storage(journal: Path, url: str | None) -> BaseStorage:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if url is None:
        return JournalStorage(JournalFileBackend(str(journal), lock_obj=_Unlocked()))  # type: ignore[arg-type]
    try:
        return RDBStorage(url)
    except Exception as e:  # the driver's own, of whichever database it is
        why = str(e).strip().partition("\n")[0]
        raise HetConvError(
            f"--storage: {why or type(e).__name__}; give sqlite:///FILE, or "
            "postgresql://USER@HOST/NAME with its "
            "driver installed"
        ) from e


Samples = Mapping[float, Passes]
"""Of a rank: by share, or by bytes."""
OPERATORS = "operators"  # the stage under which the store has them


class Trial(NamedTuple):
    """``what`` was tried; seconds relative to what it ran beside; or, of one that failed, why."""

    what: str
    value: float | None
    why: str = ""


class Study(NamedTuple):
    """Trials in order, relative to ``beside``."""

    title: str
    beside: str
    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class Record:
    """``stage_s``: seconds of each stage, none of one that an earlier run had finished.
    ``samples``: of each rank.
    """

    profile: ClusterProfile
    graph: Graph
    stage_s: Mapping[str, float | None]
    samples: Mapping[str, Sequence[Samples]]
    studies: tuple[Study, ...]


def samples_of(store: Store) -> dict[str, list[Samples]]:
    """By operator."""
    read = adapter(list[dict[float, Passes]]).validate_python
    return {
        key: list(read(value))
        for (stage, key), value in store.known.items()
        if stage == OPERATORS
    }


def studies_of(store: Store) -> tuple[Study, ...]:
    return tuple(map(study_of, store.studies()))


def study_of(study: optuna.Study) -> Study:
    """Of those trials that have come to an end."""
    trials = []
    for trial in study.get_trials(states=(TrialState.COMPLETE, TrialState.FAIL)):
        known = trial.user_attrs
        what = known.get(NAME) or ":".join(map(str, known.get(WEIGHTS, ())))
        why = known.get(WHY, "interrupted") if trial.value is None else ""
        trials.append(Trial(what, trial.value, why))
    known = study.user_attrs
    return Study(
        known.get(TITLE, study.study_name), known.get(BESIDE, ""), tuple(trials)
    )
