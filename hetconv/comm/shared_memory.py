"""Messages between ranks of one host, through memory that both map.

The sender copies a piece into memory of its own, and sends a packet on a socket between
the two that says where the piece is. The receiver reads it there, or copies it out, when
it waits for it. It reports that the memory is free when it next sends something, or
at once when much is free, since every packet wakes the other rank. A backend's
threads would wait for a core, for milliseconds at a time, where all cores compute.

Memory and sockets have no name in the file system: what a killed rank leaves behind
goes with its last process.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from math import prod

import torch
from torch import Tensor

from .packets import (
    ANCILLARY_BYTES,
    DESCRIPTOR,
    PACKET,
    CallMismatchError,
    Memory,
    Message,
    PacketKind,
    PendingReceive,
    Region,
    Shape,
)
from .rendezvous import Gather, connect, pid_of_peer
from .thread_time import MESSAGE_WAITS, OwnCore

INITIAL_BYTES = 1 << 20  # of the memory for messages one way
CACHE_LINE_BYTES = 64
# Messages that were received and not yet acknowledged to the sender, and their bytes.
MAX_UNACKNOWLEDGED, MAX_UNACKNOWLEDGED_BYTES = 64, 1 << 20
MAX_SPIN_S = 1e-3  # for which a receiver looks for a message before it sleeps
MAX_POLL_MS = (1 << 31) - 1  # the limit of poll(2)
CHECK_MS = 500.0
_own_core = OwnCore()


class Channel:
    """Both directions between this rank and another. Messages arrive in the order sent.

    Its methods raise `OSError` once the other rank has closed the channel or lets this one
    wait longer than the timeout, and `CallMismatchError` if a message has another tag or size
    than expected, or if the other rank got such a message.

    Args:
        to_peer: a socket to the other rank.
        timeout: after which a wait for the other rank raises `OSError`.
        check: called now and then in a wait; raises `OSError` if the wait is to end.
    """

    def __init__(
        self,
        to_peer: socket.socket,
        timeout: timedelta,
        check: Callable[[], object] = lambda: None,
    ):
        self._socket, self._timeout_ms = (
            to_peer,
            min(timeout / timedelta(milliseconds=1), MAX_POLL_MS),
        )
        self._check, self.peer_pid = check, pid_of_peer(to_peer)
        to_peer.setblocking(False)
        self._arrivals = select.poll()
        self._arrivals.register(to_peer, select.POLLIN)
        self._out: Memory = bytearray()
        self._in: Memory = bytearray()
        self._places: deque[Region] = (
            deque()
        )  # in `_out`, of messages that were not taken yet
        self._elsewhere = 0  # messages not taken yet that lie in memory from before
        self._came: deque[Message] = deque()
        self._announced: deque[PendingReceive] = deque()
        self._asked = self._got = 0
        self._lent: Message | None = None
        self._told: str | None = None  # what the other does, if the two are apart
        self._unacknowledged = self._unacknowledged_bytes = 0  # that were taken

    def send(self, piece: Tensor, tag: int = 0) -> None:
        """Sends a piece. When this returns, the piece may be overwritten."""
        start = self._room(piece.nbytes)
        _piece(self._out, start, piece.dtype, piece.shape).copy_(piece)
        self._ring(PacketKind.MESSAGE, start, start + piece.nbytes, tag)

    def post_receive(
        self,
        dtype: torch.dtype,
        shape: Shape,
        buffer: Tensor | None = None,
        tag: int = 0,
    ) -> PendingReceive:
        """Announces the next message, for `take` or `borrow`.

        Args:
            dtype: of the message.
            shape: of the message.
            buffer: where `take` puts it; None for new memory.
            tag: of the call that it must belong to.
        """
        self._asked += 1
        coming = PendingReceive(self._asked, dtype, shape, buffer, tag)
        self._announced.append(coming)
        return coming

    def receive_into(self, buffer: Tensor, tag: int = 0) -> Callable[[], Tensor]:
        """Announces the next message, and returns a function that waits for it.

        Args:
            buffer: where it goes; it has the dtype and shape of the message.
            tag: of the call that it must belong to.
        """
        return partial(
            self.take, self.post_receive(buffer.dtype, tuple(buffer.shape), buffer, tag)
        )

    def _receive(self, number: int) -> None:
        """Reads messages up to this number."""
        while self._got < number:
            if self._came:
                self._take()
            else:
                self._await()

    def take(self, coming: PendingReceive) -> Tensor:
        """Waits for a message and returns it in memory of its own."""
        self._receive(coming.number)
        assert coming.buffer is not None
        return coming.buffer

    def borrow(self, coming: PendingReceive) -> Tensor:
        """Waits for a message and returns it where the sender put it, until `release`.

        Nothing else may be received before `release`. A message with a buffer, or one that was
        read before, is in memory of its own.
        """
        if coming.buffer is not None:
            return self.take(coming)
        self._receive(coming.number - 1)
        while not self._came:
            self._await()
        self._lent, coming = self._next()
        return _piece(self._lent.memory, self._lent.start, coming.dtype, coming.shape)

    def release(self) -> None:
        """Gives back what was borrowed, if anything was."""
        if self._lent is not None:
            message, self._lent = self._lent, None
            self._was_taken(message)

    def tell(self, doing: str) -> None:
        """Tells the other rank what this one does, as they are in different calls.

        The other rank raises an error when it next waits.
        """
        text = torch.frombuffer(bytearray(doing.encode()), dtype=torch.uint8)
        start = self._room(text.nbytes)
        _piece(self._out, start, text.dtype, text.shape).copy_(text)
        self._ring(PacketKind.MISMATCH, start, start + text.nbytes)

    def told(self, until: float) -> str | None:
        """Returns what the other rank does, if it tells so in time.

        Args:
            until: latest time, by `time.monotonic`.
        """
        while self._told is None and (left := until - time.monotonic()) > 0:
            try:
                self._listen(left * 1e3)
            except OSError:  # it has ended, or is busy
                break
        return self._told

    def close(self) -> None:
        """Closes the channel."""
        self._socket.close()

    def __del__(self) -> None:
        self.close()

    def _take(self) -> None:
        """Reads the oldest message into the buffer that is meant for it."""
        message, coming = self._next()
        piece = _piece(message.memory, message.start, coming.dtype, coming.shape)
        if coming.buffer is None:
            coming.buffer = torch.empty_like(piece)
        coming.buffer.copy_(piece)
        self._was_taken(message)

    def _next(self) -> tuple[Message, PendingReceive]:
        assert self._lent is None  # what is told is how many of the oldest were taken
        message, coming = self._came.popleft(), self._announced.popleft()
        came, wanted = (
            message.stop - message.start,
            prod(coming.shape) * coming.dtype.itemsize,
        )
        if message.tag != coming.tag or came != wanted:
            raise CallMismatchError(
                f"a message of {came} bytes came where one of {wanted} was expected, or of "
                "another call: the two ranks "
                "do different things; call the same on every rank, in the same order"
            )
        self._got += 1
        return message, coming

    def _was_taken(self, message: Message) -> None:
        self._unacknowledged += 1
        self._unacknowledged_bytes += message.stop - message.start
        if (
            self._unacknowledged > MAX_UNACKNOWLEDGED
            or self._unacknowledged_bytes > MAX_UNACKNOWLEDGED_BYTES
        ):
            with suppress(
                ConnectionError
            ):  # of one that has ended and wants nothing any more
                self._ring(PacketKind.TAKEN)

    def _room(self, size: int) -> int:
        """Returns the offset of free memory of this size; in new memory, if there is none."""
        size = max(-(-size // CACHE_LINE_BYTES), 1) * CACHE_LINE_BYTES
        start = self._gap(size)
        if start is None and self._places:
            self._listen()
            start = self._gap(size)
        if start is None:
            self._grow(
                max(INITIAL_BYTES, 2 * len(self._out), 1 << (2 * size - 1).bit_length())
            )
            start = 0
        self._places.append(Region(start, start + size))
        return start

    def _gap(self, size: int) -> int | None:
        """Returns the offset of the first free region that is long enough.

        Memory that was used last is still in the caches of both ranks.
        """
        end = 0
        for place in sorted(self._places):
            if size <= place.start - end:
                return end
            end = place.stop
        return end if size <= len(self._out) - end else None

    def _grow(self, size: int) -> None:
        memory = os.memfd_create("hetconv")
        try:
            os.ftruncate(memory, size)
            self._out = mmap.mmap(memory, size)
            self._ring(PacketKind.MEMORY, 0, size, 0, memory)
        finally:
            os.close(memory)
        self._elsewhere += len(self._places)
        self._places.clear()

    def _ring(
        self,
        what: PacketKind,
        start: int = 0,
        stop: int = 0,
        tag: int = 0,
        *memory: int,
    ) -> None:
        packet = PACKET.pack(what, start, stop, self._unacknowledged, tag)
        self._unacknowledged = self._unacknowledged_bytes = 0
        while True:
            try:
                if memory:
                    socket.send_fds(self._socket, [packet], memory)
                else:
                    self._socket.send(packet)
                return
            except BlockingIOError:  # many packets that the other has not read
                either = select.poll()
                either.register(self._socket, select.POLLIN | select.POLLOUT)
                _wait(either, self._timeout_ms, self._check)
                self._listen()

    def _await(self) -> None:
        """Waits for a packet."""
        if self._told is not None:
            raise CallMismatchError(f"the other rank is in another call: {self._told}")
        self._listen(self._timeout_ms)

    def _listen(self, wait_ms: float = 0) -> None:
        """Reads the packets that have arrived; waits for one if there is none."""
        while True:
            try:
                packet, memory, *_ = self._socket.recvmsg(PACKET.size, ANCILLARY_BYTES)
            except (
                ConnectionResetError
            ):  # said once; what had come before can still be read
                continue
            except BlockingIOError:
                if not wait_ms:
                    return
                with MESSAGE_WAITS:
                    if not self._looked():
                        _wait(self._arrivals, wait_ms, self._check)
                continue
            if not packet:
                raise ConnectionError("it closed the connection")
            what, start, stop, taken, tag = PACKET.unpack(packet)
            self._heard(
                what,
                start,
                stop,
                taken,
                tag,
                *(DESCRIPTOR.unpack(data)[0] for _, _, data in memory),
            )
            if wait_ms:
                return

    def _looked(self) -> bool:
        """Polls for a packet, if this rank has a core to itself, and returns whether one came.

        A rank that sleeps wakes after 50 us, and the sender takes 30 us to wake it.
        """
        until = time.perf_counter() + MAX_SPIN_S if _own_core() else 0.0
        while time.perf_counter() < until:
            if self._arrivals.poll(0):
                return True
        return False

    def _heard(
        self, what: int, start: int, stop: int, taken: int, tag: int, memory: int = -1
    ) -> None:
        elsewhere = min(taken, self._elsewhere)
        self._elsewhere -= elsewhere
        for _ in range(taken - elsewhere):
            self._places.popleft()
        if what == PacketKind.MEMORY:
            self._in = mmap.mmap(memory, stop)
            os.close(memory)
        elif what == PacketKind.MESSAGE:
            self._came.append(Message(self._in, start, stop, tag))
        elif what == PacketKind.MISMATCH:
            self._told = bytes(self._in[start:stop]).decode()


def _wait(poll: select.poll, wait_ms: float, check: Callable[[], object]) -> None:
    left_ms = wait_ms
    while left_ms > 0:  # not by a clock: it goes on while all ranks are stopped
        if poll.poll(min(left_ms, CHECK_MS)):
            return
        check()
        left_ms -= CHECK_MS
    raise TimeoutError(f"nothing came within {wait_ms / 1e3:g} s")


def _piece(memory: Memory, start: int, dtype: torch.dtype, shape: Shape) -> Tensor:
    """Returns the tensor at an offset of a memory."""
    numel = prod(shape)
    if not numel:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start).view(shape)


def open_channels(
    rank: int, gather: Gather, timeout: timedelta, check: Callable[[], object]
) -> dict[int, Channel]:
    """Returns a channel to each rank of this host that can be reached. Collective.

    Args:
        rank: this rank.
        gather: returns an object of each rank, in rank order.
        timeout: after which a wait for the other rank raises `OSError`.
        check: called now and then in a wait; raises `OSError` if the wait is to end.
    """
    return {
        peer: Channel(to, timeout, check) for peer, to in connect(rank, gather).items()
    }
