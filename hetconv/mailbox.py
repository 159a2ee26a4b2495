"""Messages between ranks of one host, through memory that both of them map; nobody but the two takes part.

The sender copies a piece into memory of its own, and rings: a packet on a socket between the two says where it lies.
The receiver copies it out when it waits for it. That the place is free again it says when it next has something to
send, or rings back once much is: every ring wakes the other one. A backend's threads, which carry pieces otherwise,
wait for a core wherever all cores compute, for milliseconds at a time.

Nothing has a name in the file system: what a rank that was killed leaves behind goes with its last process.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import DisagreementError

FIRST = 1 << 20  # bytes of memory for messages one way, to begin with
ALIGN = 64  # bytes, a cache line
PACKET = struct.Struct("<BQQI")
DESCRIPTOR = struct.Struct("i")  # of a file
UNTOLD, UNTOLD_BYTES = 64, 1 << 20  # of messages that were taken, and the sender does not know it
SECRET = 16  # bytes that a rank must know to be let in
VISIT = struct.Struct(f"<{SECRET}sQ")  # the secret, and who it is
PATIENCE = 1.0  # seconds, for what is there already
LONGEST = (1 << 31) - 1  # milliseconds that poll(2) can wait
Memory = mmap.mmap | bytearray
Gather = Callable[[Any], list[Any]]
"""What every rank gives, in rank order; collective."""


class What(IntEnum):
    """Of a packet, which says where, in bytes, and how many of the oldest messages were taken since the last one."""

    MEMORY = 0  # comes with it, for all messages from now on
    MESSAGE = 1  # lies there
    TAKEN = 2  # are so many, and there is nothing else to say; nowhere


class Place(NamedTuple):
    start: int
    stop: int


NOWHERE = Place(0, 0)


class Message(NamedTuple):
    memory: Memory
    place: Place


class Channel:
    """Both ways between this rank and another. What is sent is taken in the same order.

    Raises `OSError` once the other has closed it, or lets this rank wait longer than ``timeout``, and
    `DisagreementError` if a message is not as long as the one that was expected.
    """

    def __init__(self, to_peer: socket.socket, timeout: timedelta):
        self._socket, self._timeout_ms = to_peer, min(timeout / timedelta(milliseconds=1), LONGEST)
        to_peer.setblocking(False)
        self._arrivals = select.poll()
        self._arrivals.register(to_peer, select.POLLIN)
        self._out: Memory = bytearray()
        self._in: Memory = bytearray()
        self._places: deque[Place] = deque()  # in `_out`, of messages that were not taken yet
        self._elsewhere = 0  # messages not taken yet that lie in memory from before
        self._came: deque[Message] = deque()
        self._expected: deque[Tensor] = deque()
        self._asked = self._got = 0
        self._untold = self._untold_bytes = 0  # that were taken

    def send(self, piece: Tensor) -> None:
        """When this returns the piece may be written to, whatever the receiver does meanwhile."""
        start = self._room(piece.nbytes)
        place = Place(start, start + piece.nbytes)
        _piece(Message(self._out, place), piece).copy_(piece)
        self._ring(What.MESSAGE, place)

    def expect(self, buffer: Tensor) -> Callable[[], None]:
        """The next message comes into ``buffer``, of its dtype and shape; what is returned waits for it."""
        self._expected.append(buffer)
        self._asked += 1
        number = self._asked

        def wait() -> None:
            while self._got < number:
                if self._came:
                    self._take()
                else:
                    self._listen(self._timeout_ms)

        return wait

    def close(self) -> None:
        self._socket.close()

    def __del__(self) -> None:
        self.close()

    def _take(self) -> None:
        """The oldest message that lies there: into the buffer that was meant for it."""
        message, buffer = self._came.popleft(), self._expected.popleft()
        start, stop = message.place
        if stop - start != buffer.nbytes:
            raise DisagreementError(
                f"a message of {stop - start} bytes came where one of {buffer.nbytes} was expected: the two ranks do "
                "different things; call the same on every rank, in the same order"
            )
        buffer.copy_(_piece(message, buffer))
        self._got += 1
        self._untold += 1
        self._untold_bytes += buffer.nbytes
        if self._untold > UNTOLD or self._untold_bytes > UNTOLD_BYTES:
            with suppress(ConnectionError):  # of one that has ended and wants nothing any more
                self._ring(What.TAKEN)

    def _room(self, size: int) -> int:
        """Where so many bytes fit beside what was not taken yet, as far as is known; in new memory, if nowhere."""
        size = max(-(-size // ALIGN), 1) * ALIGN
        start = self._gap(size)
        if start is None and self._places:
            self._listen()
            start = self._gap(size)
        if start is None:
            self._grow(max(FIRST, 2 * len(self._out), 1 << (2 * size - 1).bit_length()))
            start = 0
        self._places.append(Place(start, start + size))
        return start

    def _gap(self, size: int) -> int | None:
        if not self._places:
            return 0 if size <= len(self._out) else None
        oldest, newest = self._places[0], self._places[-1]
        if newest.start < oldest.start:  # it has begun again from the front
            return newest.stop if size <= oldest.start - newest.stop else None
        if size <= len(self._out) - newest.stop:
            return newest.stop
        return 0 if size <= oldest.start else None

    def _grow(self, size: int) -> None:
        memory = os.memfd_create("hetconv")
        try:
            os.ftruncate(memory, size)
            self._out = mmap.mmap(memory, size)
            self._ring(What.MEMORY, Place(0, size), memory)
        finally:
            os.close(memory)
        self._elsewhere += len(self._places)
        self._places.clear()

    def _ring(self, what: What, place: Place = NOWHERE, *memory: int) -> None:
        packet = PACKET.pack(what, *place, self._untold)
        self._untold = self._untold_bytes = 0
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
                _wait(either, self._timeout_ms)
                self._listen()

    def _listen(self, wait_ms: float = 0) -> None:
        """Reads the packets that have come; or waits for one, and reads that."""
        while True:
            try:
                packet, memory, *_ = self._socket.recvmsg(PACKET.size, socket.CMSG_LEN(DESCRIPTOR.size))
            except ConnectionResetError:  # said once; what had come before can still be read
                continue
            except BlockingIOError:
                if not wait_ms:
                    return
                _wait(self._arrivals, wait_ms)
                continue
            if not packet:
                raise ConnectionError("it closed the connection")
            what, start, stop, taken = PACKET.unpack(packet)
            self._heard(what, Place(start, stop), taken, *(DESCRIPTOR.unpack(data)[0] for _, _, data in memory))
            if wait_ms:
                return

    def _heard(self, what: int, place: Place, taken: int, memory: int = -1) -> None:
        elsewhere = min(taken, self._elsewhere)
        self._elsewhere -= elsewhere
        for _ in range(taken - elsewhere):
            self._places.popleft()
        if what == What.MEMORY:
            self._in = mmap.mmap(memory, place.stop)
            os.close(memory)
        elif what == What.MESSAGE:
            self._came.append(Message(self._in, place))


def _wait(poll: select.poll, wait_ms: float) -> None:
    if not poll.poll(wait_ms):
        raise TimeoutError(f"nothing came within {wait_ms / 1e3:g} s")


def _piece(message: Message, like: Tensor) -> Tensor:
    """What lies there, with the dtype and shape of another one."""
    if not like.numel():
        return torch.empty_like(like)
    start = message.place.start
    return torch.frombuffer(message.memory, dtype=like.dtype, count=like.numel(), offset=start).view(like.shape)


def channels(rank: int, gather: Gather, timeout: timedelta) -> dict[int, Channel]:
    """To every rank that this one can reach on its host, as both of the two know; collective."""
    if not hasattr(os, "memfd_create"):  # not Linux
        gather(None)
        gather(())
        return {}
    name, secret = f"\0hetconv-{secrets.token_hex(SECRET)}", secrets.token_bytes(SECRET)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(name)
        door.listen()
        doors = gather((name, secret))
        found = {peer: to for peer in range(rank) if doors[peer] is not None and (to := _visited(rank, *doors[peer]))}
        visits = gather(tuple(found))
        visitors = {peer for peer, visited in enumerate(visits) if rank in visited}
        found |= _let_in(door, visitors, secret)
    return {peer: Channel(to, timeout) for peer, to in found.items()}


def _visited(rank: int, name: str, secret: bytes) -> socket.socket | None:
    """A connection to the rank of this name; None if it is on another host, or in another network namespace."""
    to_peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    to_peer.settimeout(PATIENCE)
    try:
        to_peer.connect(name)
        to_peer.send(VISIT.pack(secret, rank))
    except OSError:
        to_peer.close()
        return None
    return to_peer


def _let_in(door: socket.socket, visitors: set[int], secret: bytes) -> dict[int, socket.socket]:
    """All of these, who are waiting there by now; nobody else, whoever may knock."""
    found: dict[int, socket.socket] = {}
    door.settimeout(PATIENCE)
    while visitors - found.keys():
        visitor, _ = door.accept()
        visitor.settimeout(PATIENCE)
        try:
            said, peer = VISIT.unpack(visitor.recv(VISIT.size))
        except (OSError, struct.error):
            said, peer = b"", -1
        if secrets.compare_digest(said, secret) and peer in visitors:
            found[peer] = visitor
        else:
            visitor.close()
    return found
