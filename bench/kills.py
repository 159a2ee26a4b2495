"""Kill or stop `hetconv autotune` at random moments: what was measured must survive."""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from argparse import ArgumentParser, Namespace
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.shared.machine import ROOT, add_output_argument, commit, save
from bench.shared.selection import whole_number
from hetconv.autotune.search.journal import journal_of
from hetconv.schemas.cluster_profile import ClusterProfile

LIMIT_S = 30.0  # within which all is over
DEVICES = "cpu", "cpu@0.5"
ASKED = (
    "--devices",
    ",".join(DEVICES),
    "--model",
    "bench.shared.models:stack",
    "--model-args",
    '{"blocks": 1, "channels": 4}',
    "--input",
    "1x3x48x48",
    "--trials",
    "4",
    "--budget",
    "20",
)
MARK = (
    "HETCONV_KILLS"  # the environment variable by which a tuning's processes are known
)
RECORDS, TRIALS = "hetconv_records", "trials"  # tables of the journal


@dataclass(frozen=True)
class Kill:
    """What came of one.

    Attributes:
        victim: A rank's number, or the launcher.
        signal: "SIGKILL", or, for a rank only, "SIGSTOP".
        after_s: Seconds from the start of the tuning.
        over_s: Seconds until all its processes had ended.
        kept: Measurements and trials that were kept.
        wrong: What should not be.
    """

    victim: str
    signal: str
    after_s: float
    over_s: float
    kept: int
    wrong: tuple[str, ...]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-n",
        type=whole_number(1),
        default=50,
        metavar="KILLS",
        help="how many (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of victims and moments (default: %(default)s)",
    )
    add_output_argument(parser)


def run(args: Namespace) -> None:
    """Prints a line per kill, and the results as one JSON document last. Exits with
    status 1 if anything was wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        span = whole(Path(folder, "whole"))
        print(
            f"a whole run takes {span:.0f} s; after a kill all must be over within {LIMIT_S:.0f} s",
            flush=True,
        )
        kills = killed(Path(folder), args.n, args.seed, span)
    wrong = sum(bool(kill.wrong) for kill in kills)
    setup = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **commit(),
    }
    results = {
        "suite": "kills",
        **setup,
        "seed": args.seed,
        "kills": len(kills),
        "wrong": wrong,
        "over_s": {
            "median": median(k.over_s for k in kills),
            "most": max(k.over_s for k in kills),
        },
    }
    if args.output is not None:
        document = results | {"cases": [asdict(kill) for kill in kills]}
        save(args.output, document)
    print(json.dumps(results))
    if wrong:
        raise SystemExit(1)


def killed(folder: Path, count: int, seed: int, span: float) -> list[Kill]:
    """So many kills, of the launcher or any rank, each after up to ``span`` seconds; printed.

    In between, the job goes on from where it was; after one that was done comes
    another. The last one is not disturbed.
    """
    choose, found, jobs = random.Random(seed), list[Kill](), 1
    while len(found) < count:
        tuning = Tuning(folder / str(jobs))
        try:
            tuning.launcher.wait(timeout=choose.uniform(0, span))
        except subprocess.TimeoutExpired:
            victim, pid = choose.choice(sorted(tuning.victims.items()))
            # A launcher that is stopped goes on when its user wants it to.
            stops = victim != "launcher" and choose.random() < 0.5
            kill = tuning.kill(victim, pid, "SIGSTOP" if stops else "SIGKILL")
        else:
            kill = None
        if kill is None:
            jobs += 1
            continue
        found.append(kill)
        wrong = "".join(f"; WRONG: {wrong}" for wrong in kill.wrong)
        said = (
            f"{kill.victim}, {kill.signal} after {kill.after_s:.1f} s: {kill.kept} kept, "
            f"over after {kill.over_s:.1f} s{wrong}"
        )
        print(f"{len(found)}/{count} {said}", flush=True)
    print(
        f"resumed and done in {whole(folder / str(jobs)):.0f} s, after {jobs} jobs",
        flush=True,
    )
    return found


def whole(folder: Path) -> float:
    """Seconds of a run that nobody disturbs. Raises `RuntimeError` if it fails."""
    tuning, start = Tuning(folder), time.monotonic()
    if tuning.launcher.wait(timeout=20 * LIMIT_S):
        raise RuntimeError(tuning.said)
    ClusterProfile.load(tuning.output)
    return time.monotonic() - start


class Tuning:
    """A `hetconv autotune --resume` under way, all of whose processes are known by a mark."""

    def __init__(self, folder: Path):
        folder.mkdir(exist_ok=True)
        self.output, self._mark, self._log = (
            folder / "cluster.json",
            uuid.uuid4().hex,
            folder / "log",
        )
        self.journal, self.start = journal_of(self.output), time.monotonic()
        self.before = {table: _rows(self.journal, table) for table in (RECORDS, TRIALS)}
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        env |= {MARK: self._mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "hetconv",
            "autotune",
            *ASKED,
            "-o",
            str(self.output),
            "--resume",
        ]
        with open(self._log, "w", encoding="utf-8") as log:
            self.launcher = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stderr=log,
                stdout=log,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def processes(self) -> dict[int, str]:
        """The command lines of those that are alive, by number."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self._mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    )
            except OSError:  # another's, or gone
                continue
        return found

    @property
    def victims(self) -> dict[str, int]:
        """The launcher and the ranks that there are by now."""
        ranks = sorted(
            pid for pid, command in self.processes().items() if "spawn_main" in command
        )
        return {"launcher": self.launcher.pid} | {
            f"rank {rank}": pid for rank, pid in enumerate(ranks)
        }

    def kill(self, victim: str, pid: int, name: str) -> Kill | None:
        """What comes of it; None if that process ended just before."""
        start = time.monotonic()
        try:
            os.kill(pid, signal.Signals[name])
        except ProcessLookupError:
            self._wait()
            return None
        left, over_s = self._wait(), time.monotonic() - start
        wrong = (
            *(f"{pid} is left: {command}" for pid, command in left.items()),
            *self._wrong(victim, name),
        )
        after_s = round(start - self.start, 2)
        return Kill(victim, name, after_s, round(over_s, 2), self.kept, wrong)

    def _wait(self) -> dict[int, str]:
        """Until all are gone; those that are not in time, which are ended."""
        latest = time.monotonic() + LIMIT_S
        while (left := self.processes()) and time.monotonic() < latest:
            time.sleep(0.05)
            self.launcher.poll()  # or it stays as a zombie
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self.launcher.wait()
        return left

    def grown(self, table: str) -> int:
        """Rows that this run has added to a table."""
        return len(_rows(self.journal, table).keys() - self.before[table].keys())

    @property
    def kept(self) -> int:
        """Records of what was measured, and trials."""
        return sum(len(_rows(self.journal, table)) for table in (RECORDS, TRIALS))

    def _wrong(self, victim: str, name: str) -> list[str]:
        wrong = []
        if self.output.exists():
            try:
                ClusterProfile.load(self.output)
            except ValueError as e:
                wrong.append(str(e))
        try:
            for table, before in self.before.items():
                if not before.keys() <= _rows(self.journal, table).keys():
                    wrong.append(f"{table} lost what it had")
        except sqlite3.Error as e:
            wrong.append(f"{self.journal}: {e}")
        if self.launcher.returncode == 0:
            return wrong  # it was done before it learnt of it
        if victim != "launcher" and not self._names(victim, name):
            wrong.append(
                f"it ended with status {self.launcher.returncode}, and said {self.said[-300:]!r}"
            )
        return wrong

    def _names(self, rank: str, name: str) -> bool:
        device = DEVICES[int(rank.removeprefix("rank "))]
        last = self.said.splitlines()[-1]
        cause = {
            "SIGKILL": f"{rank} ({device}) was killed by SIGKILL; last action: ",
            "SIGSTOP": f"lost {rank}, which is stopped",
        }
        return self.launcher.returncode == 2 and cause[name] in last


def _rows(journal: Path, table: str) -> dict[tuple[Any, ...], Any]:
    """What a table holds: records by stage and key, trials by number.

    Nothing where there is no such table yet.
    """
    if not journal.exists():
        return {}
    with closing(sqlite3.connect(journal, timeout=60)) as db:
        known = "SELECT count(*) FROM sqlite_schema WHERE name = ?"
        (there,) = db.execute(known, (table,)).fetchone()
        if not there:
            return {}
        columns = "stage, key, value" if table == RECORDS else "trial_id, state"
        return {
            row[:-1]: row[-1] for row in db.execute(f"SELECT {columns} FROM {table}")
        }
