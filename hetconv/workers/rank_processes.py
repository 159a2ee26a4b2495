"""The worker processes of one `Workers`: how they start, answer and end."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from hetconv.errors import HetConvError, LostRankError
from hetconv.runtime.local_rank import rank_settings
from hetconv.runtime.throttle import DeviceName
from hetconv.schemas.provenance import DeviceIdentity

from .messages import Answer, Call, Load
from .transport import SharedMemory

MAX_END_S = 5.0  # in which workers end by themselves
MAX_APART_S = 10.0  # in which all fail, or answer, once one of them has failed
ENDED_S = 0.5  # after its connection ended, a process has
CLOSED = "; the workers are closed, make new ones"
# Not `multiprocessing`: it would run the program's main file in each worker, start a
# process of its own that stays, and change this process's environment while it starts them.
PROGRAM = """\
import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = given.pop("path")
from hetconv.workers.caller_watch import end_with_caller
end_with_caller(given["connection"], given.pop("caller"))
from hetconv.workers.worker_process import run
run(**given)
"""


class RankProcesses:
    """One process per device, ranks of a process group of their own.

    Args:
        devices: The device of each rank.

    Raises:
        HetConvError: They cannot be started.
    """

    def __init__(self, devices: Sequence[DeviceName]):
        _check_system()
        self.devices = tuple(devices)
        self.closed: str | None = None
        self._owner = os.getpid()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self.models, self.arguments, self.results = (SharedMemory() for _ in range(3))
        rendezvous = SharedMemory()
        try:
            settings = os.environ | rank_settings(len(devices))
            for rank in range(len(devices)):
                self._start(rank, rendezvous.descriptor, settings)
            self.identities = self._started()
        except BaseException:
            self.end("its start failed", at_once=True)
            raise
        finally:
            rendezvous.close()

    def _start(self, rank: int, rendezvous: int, settings: dict[str, str]) -> None:
        here, there = Pipe()
        self._connections.append(here)
        given = {
            "connection": there.fileno(),
            "rendezvous": rendezvous,
            "models": self.models.descriptor,
            "arguments": self.arguments.descriptor,
            "results": self.results.descriptor,
        }
        more: dict[str, Any] = {
            "path": [str(path) for path in sys.path],
            "rank": rank,
            "devices": [str(device) for device in self.devices],
            "caller": self._owner,
            "seed": torch.initial_seed(),
        }
        with there:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, json.dumps(given | more)],
                stdin=subprocess.DEVNULL,
                pass_fds=tuple(given.values()),
                env=settings,
                process_group=0,  # a terminal sends Ctrl-C to the caller's alone
            )
        self._processes.append(process)

    def _started(self) -> tuple[DeviceIdentity, ...]:
        answers = self._answers(0.0)
        self._check(answers, "")
        identities = [answers[rank].value for rank in range(len(self.devices))]
        return tuple(i for i in identities if isinstance(i, DeviceIdentity))

    def ask(self, request: Load | Call) -> Answer:
        """Sends a request to all workers, and returns rank 0's answer.

        Raises:
            LostRankError: A worker has ended.
            Exception: What workers raised. If they may be in different places, they are
                ended, and the message says so.
        """
        self.check_open()
        try:
            data = pickle.dumps(request)
            for connection in self._connections:
                with suppress(OSError):  # it has ended, which is noticed below
                    connection.send_bytes(data)
            answers = self._answers(MAX_APART_S)
        except BaseException as e:  # Ctrl-C, too: nobody knows where the workers are
            self.end(f"{type(e).__name__} interrupted a call", at_once=True)
            raise
        self._check(answers, CLOSED)
        return answers[0]

    def check_open(self) -> None:
        """Raises `HetConvError` if the workers have ended, or are another process's."""
        if os.getpid() != self._owner:
            raise HetConvError(
                f"these workers belong to process {self._owner}, from which this one was "
                "forked; make Workers in this process, or call them in that one"
            )
        if self.closed is not None:
            raise HetConvError(f"the workers are closed: {self.closed}; make new ones")

    def end(self, why: str, *, at_once: bool = False) -> None:
        """Ends the processes, if that has not been done, and closes all that was open.

        Args:
            why: For the error of later requests.
            at_once: Whether workers are not to end by themselves.
        """
        if self.closed is not None or os.getpid() != self._owner:
            return
        self.closed = why
        deadline = time.monotonic() + MAX_END_S * (not at_once)
        try:
            if not at_once:
                self._wait_for_end(deadline)
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
            for connection in self._connections:
                connection.close()
            for memory in (self.models, self.arguments, self.results):
                memory.close()

    def _wait_for_end(self, deadline: float) -> None:
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))

    def _answers(self, max_apart_s: float) -> dict[int, Answer]:
        """Returns the answers of workers by rank, in the order in which they came.

        Those of others are missing if one has ended, or ``max_apart_s`` after an error.
        """
        answers: dict[int, Answer] = {}
        waiting = {c: rank for rank, c in enumerate(self._connections)}
        deadline = math.inf
        while waiting:
            left = (
                None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
            )
            ready = wait(list(waiting), left)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    return answers
                if answers[rank].failure is not None:
                    deadline = min(deadline, time.monotonic() + max_apart_s)
            if not ready:
                break
        return answers

    def _check(self, answers: Mapping[int, Answer], closed: str) -> None:
        """Raises what went wrong, if anything did, and ends the workers where it must."""
        failures = {
            rank: answer.failure for rank, answer in answers.items() if answer.failure
        }
        silent = [r for r in range(len(self.devices)) if r not in answers]
        if not failures and not silent:
            return
        for rank in silent:  # of which one has died, and the others wait for it
            how = self._how_it_ended(rank)
            if how is not None:
                text = f"the worker of rank {rank} ({self.devices[rank]}) {how}"
                self.end(text, at_once=True)
                raise LostRankError(text + closed)
        rank, first = next(iter(failures.items()))
        alike = len(failures) == len(self.devices) and all(
            first.is_alike(failure) for failure in failures.values()
        )
        in_step = not silent and all(failure.in_step for failure in failures.values())
        if closed and (alike or in_step) and not first.lost:
            raise first.to_error()
        self.end(f"rank {rank} failed and others did not, or elsewhere", at_once=True)
        raise first.to_error(closed)

    def _how_it_ended(self, rank: int) -> str | None:
        """Returns how a worker ended; None if it has not."""
        with suppress(subprocess.TimeoutExpired):
            status = self._processes[rank].wait(ENDED_S)
            if status >= 0:
                return f"ended with status {status}; see what it wrote"
            name = signal.Signals(-status).name
            full = ", as the system does where memory is short" * (name == "SIGKILL")
            return f"was killed by {name}{full}"
        return None


def _check_system() -> None:
    if not hasattr(os, "memfd_create"):
        raise HetConvError(
            f"Workers need Linux, and this is {sys.platform}; start ranks with torchrun, and "
            "use hetconv.parallelize"
        )
    if not sys.executable:
        raise HetConvError(
            "Workers start other Python processes, but this program does not know its "
            "interpreter; set sys.executable"
        )
