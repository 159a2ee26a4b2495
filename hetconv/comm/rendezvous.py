"""Connections between the ranks of one host.

Each rank listens on a socket, and connects to the ranks that listened before it.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any

SECRET_BYTES = 16  # bytes that a rank must know to be let in
GREETING = struct.Struct(f"<{SECRET_BYTES}sQ")  # the secret, and who it is
CONNECT_TIMEOUT_S = 1.0  # seconds, for what is there already
PEER = struct.Struct("3i")  # process, user and group of who holds the other end
Gather = Callable[[Any], list[Any]]
"""What every rank gives, in rank order; collective."""


def connect(rank: int, gather: Gather) -> dict[int, socket.socket]:
    """Returns a socket to each rank of this host that can be reached. Collective.

    Args:
        rank: this rank.
        gather: returns an object of each rank, in rank order.
    """
    if not hasattr(os, "memfd_create"):  # not Linux
        gather(None)
        gather(())
        return {}
    name, secret = (
        f"\0hetconv-{secrets.token_hex(SECRET_BYTES)}",
        secrets.token_bytes(SECRET_BYTES),
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(name)
        door.listen()
        doors = gather((name, secret))
        found = {
            peer: to
            for peer in range(rank)
            if doors[peer] is not None and (to := _visited(rank, *doors[peer]))
        }
        visits = gather(tuple(found))
        visitors = {peer for peer, visited in enumerate(visits) if rank in visited}
        return found | _let_in(door, visitors, secret)


def _visited(rank: int, name: str, secret: bytes) -> socket.socket | None:
    """Returns a connection to the rank with this name, or None.

    It is None for a rank of another host, or in another network namespace.
    """
    to_peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    to_peer.settimeout(CONNECT_TIMEOUT_S)
    try:
        to_peer.connect(name)
        to_peer.send(GREETING.pack(secret, rank))
    except OSError:
        to_peer.close()
        return None
    return to_peer


def _let_in(
    door: socket.socket, visitors: set[int], secret: bytes
) -> dict[int, socket.socket]:
    """Accepts the connections of these ranks, which wait already, and of nobody else."""
    found: dict[int, socket.socket] = {}
    door.settimeout(CONNECT_TIMEOUT_S)
    while visitors - found.keys():
        visitor, _ = door.accept()
        visitor.settimeout(CONNECT_TIMEOUT_S)
        try:
            said, peer = GREETING.unpack(visitor.recv(GREETING.size))
        except (OSError, struct.error):
            said, peer = b"", -1
        if secrets.compare_digest(said, secret) and peer in visitors:
            found[peer] = visitor
        else:
            visitor.close()
    return found


def pid_of_peer(to_peer: socket.socket) -> int:
    """Returns the process that opened the other end; 0 where it cannot be seen from here."""
    if not hasattr(socket, "SO_PEERCRED"):  # not Linux
        return 0
    return int(
        PEER.unpack(
            to_peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        )[0]
    )
