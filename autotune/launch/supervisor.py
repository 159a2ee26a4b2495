"""Local rank processes, of which none outlives this process or a rank that failed."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from torch.multiprocessing.spawn import start_processes

from hetconv.errors import HetConvError, LostRankError

GRACE_S = 5.0  # in which ranks may end by themselves once one of them has failed
POLL_S = 0.1
MAX_START_S = 60.0  # on a busy machine, until a process reports its first action
MAX_END_S = 1.0  # for which a rank cleans up when its parent has ended
NOT_STARTED = "start"
_action_file: Path | None = None


class RankFailedError(HetConvError):
    """A local rank raised an error, died, or reported nothing for too long.

    Attributes:
        rank: Its number.
        kind: "raised", "died" or "hung".
        detail: The error's text, how the process ended, or the limit in seconds.
        last_action: What the rank reported last.
        last_output: The last line that it printed, if its output was kept.

    The traceback of a rank that raised an error is a note of this one.
    """

    def __init__(
        self,
        rank: int,
        name: str,
        kind: Literal["raised", "died", "hung"],
        detail: str,
        last_action: str,
        last_output: str = "",
    ) -> None:
        self.rank, self.kind, self.detail = rank, kind, detail
        self.last_action, self.last_output = last_action, last_output
        verb = "failed: " if kind == "raised" else ""
        action = f"; last action: {last_action}" if last_action else ""
        super().__init__(f"rank {rank} ({name}) {verb}{detail}{action}")


def log_last_action(action: str) -> None:
    """Records what this rank is doing, for the report of its failure.

    It does nothing in a process that `run_ranks` did not start.
    """
    if _action_file is not None:
        # Renamed when it is whole, for this process may be killed at any moment. The
        # folder is gone once the parent has ended, and must not be made again.
        written = _action_file.with_suffix(".new")
        written.write_text(action, encoding="utf-8")
        written.replace(_action_file)


def run_ranks(
    names: Sequence[str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    start_method: Literal["spawn", "forkserver"] = "spawn",
    grace_s: float = GRACE_S,
    max_silence_s: float | None = None,
    keep_output: bool = False,
) -> Any:
    """Calls ``fn(rank, rendezvous, *args)`` in a new process for each name.

    The processes end with this one, however it ends, and soon after the first of them
    that fails.

    Args:
        names: The names of the ranks in error messages, such as their devices.
        fn: A picklable function. ``rendezvous`` is the ``file://`` address of a process
            group.
        args: Picklable arguments.
        start_method: A start method of `multiprocessing`.
        grace_s: Seconds in which the others may end after a failure.
        max_silence_s: Seconds after which a rank that logs no action counts as hung;
            None for never.
        keep_output: Whether the ranks' output goes to files instead of this process's
            output, for `RankFailedError.last_output`.

    Returns:
        The result of rank 0.

    Raises:
        RankFailedError: A rank failed; it names the first one.
    """
    with tempfile.TemporaryDirectory(prefix="hetconv-ranks-") as directory:
        folder = Path(directory)
        processes: list[BaseProcess] = []
        try:
            with _interrupts_deferred():
                context = start_processes(
                    _run_rank,
                    (folder, keep_output, fn, args),
                    len(names),
                    join=False,
                    start_method=start_method,
                )
                assert context is not None
                processes += context.processes
            _wait(processes, folder, names, grace_s, max_silence_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return pickle.loads((folder / "result").read_bytes())


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Defers SIGINT to the end, and blocks it for good in processes that start meanwhile.

    A terminal sends Ctrl-C to all of them; this process is the one that ends the others,
    for which it has to know them.
    """
    resource_tracker.ensure_running()  # it would unblock the signal
    arrived: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    if main:  # the system may give the signal to another thread, which blocks nothing
        handler = signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if main:
            signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
        if arrived:
            signal.raise_signal(signal.SIGINT)


def _wait(
    processes: Sequence[BaseProcess],
    folder: Path,
    names: Sequence[str],
    grace_s: float,
    max_silence_s: float | None,
) -> None:
    start, deadline = time.time(), math.inf
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    ended: dict[int, int] = {}  # exit status by rank, in the order in which they ended
    while running and time.monotonic() < deadline:
        watched = max_silence_s is not None or deadline < math.inf
        for sentinel in connection.wait(list(running), POLL_S if watched else None):
            assert isinstance(sentinel, int)
            rank = running.pop(sentinel)
            # A sentinel is ready a little before the exit status is known.
            processes[rank].join()
            ended[rank] = processes[rank].exitcode or 0
        if any(ended.values()):
            deadline = min(deadline, time.monotonic() + grace_s)
        elif max_silence_s is not None:
            _check_silence(running.values(), folder, names, start, max_silence_s)
    if any(ended.values()):
        raise _failure(folder, names, ended)


def _check_silence(
    alive: Iterable[int],
    folder: Path,
    names: Sequence[str],
    start: float,
    max_silence_s: float,
) -> None:
    for rank in alive:
        file = folder / f"{rank}.action"
        limit_s = max_silence_s if file.exists() else max(MAX_START_S, max_silence_s)
        last = file.stat().st_mtime if file.exists() else start
        if time.time() - last > limit_s:
            action = _last_action(folder, rank)
            detail = f"no answer for {limit_s:g} s"
            raise RankFailedError(rank, names[rank], "hung", detail, action)


def _failure(
    folder: Path, names: Sequence[str], ended: Mapping[int, int]
) -> RankFailedError:
    """Error of the rank that failed first.

    A rank that died without a word is the cause of the errors of the others.
    """
    errors = {
        rank: folder / f"{rank}.error" for rank, status in ended.items() if status
    }
    died = [rank for rank, file in errors.items() if not file.exists()]
    if not died:
        rank = min(errors, key=lambda rank: errors[rank].stat().st_mtime_ns)
        text, action, stack = pickle.loads(errors[rank].read_bytes())
        failure = RankFailedError(rank, names[rank], "raised", text, action)
        failure.add_note(f"Of rank {rank}:\n{stack}")
        return failure
    rank = died[0]
    status = ended[rank]
    detail = (
        f"was killed by {signal.Signals(-status).name}"
        if status < 0
        else f"ended with status {status}"
    )
    action, output = _last_action(folder, rank), _last_line(folder / f"{rank}.output")
    return RankFailedError(rank, names[rank], "died", detail, action, output)


def _last_action(folder: Path, rank: int) -> str:
    file = folder / f"{rank}.action"
    return file.read_text(encoding="utf-8") if file.exists() else NOT_STARTED


def _last_line(file: Path) -> str:
    if not file.exists():
        return ""
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _run_rank(
    rank: int, folder: Path, keep_output: bool, fn: Callable[..., Any], args: Any
) -> None:
    global _action_file
    try:
        (folder / f"{os.getpid()}.pid").touch()
    except FileNotFoundError:  # the parent has ended, and another rank noticed it first
        os._exit(1)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    # A fork server that runs already does not block it for new processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if keep_output:
        with open(folder / f"{rank}.output", "wb") as output:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
    _action_file = folder / f"{rank}.action"
    try:
        result = fn(rank, f"file://{folder}/rendezvous", *args)
        if rank == 0:
            (folder / "result").write_bytes(pickle.dumps(result))
    except BaseException as e:
        # An error of hetconv's own says all that there is to say.
        complete = isinstance(e, HetConvError) and not isinstance(e, LostRankError)
        text = "".join(traceback.format_exception_only(e)).strip()
        summary = (str(e), "") if complete else (text, _last_action(folder, rank))
        error = (*summary, traceback.format_exc())
        (folder / f"{rank}.error").write_bytes(pickle.dumps(error))
        sys.stderr.flush()
        # At once: open connections could keep this process, and so the others.
        os._exit(1)


def _end_with_parent(folder: Path) -> None:
    """Ends all ranks when the process that started them has ended, and removes its folder.

    The signal that torch sends a process at the death of its parent is not enough: it
    is SIGINT, which a process that waits within a C++ library does not handle. Nor does
    such a process give Python's lock to this thread, so the first rank that gets here
    ends the others.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    # The main thread may take Python's lock at any call below, and wait for the folder.
    signal.setitimer(signal.ITIMER_REAL, MAX_END_S)
    with suppress(FileNotFoundError):  # another rank was first
        # Renamed at once: a rank that starts later finds no folder, and ends.
        ended = folder.rename(folder.with_name(folder.name + "-ended"))
        for file in ended.glob("*.pid"):
            if (pid := int(file.stem)) != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(ended, ignore_errors=True)
    os._exit(1)
