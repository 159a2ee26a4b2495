"""What shows that another rank still runs: its state on this host, or its answer.

A process of this host is stopped if the system says so. A process of another host runs
if it answers. Each rank has a `torch.distributed.TCPStore` for each group, whose server
is a C++ thread: it answers while Python is busy or an operator holds Python's lock, costs
nothing until it is asked, and falls silent with the process or with the link to it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

c10d: Any = dist  # its stores are not among what it exports by name
log = logging.getLogger("hetconv")
CONNECT_TIMEOUT_S = 3.0
"""Within which a rank that listens is reached, or not at all."""
OPEN_TIMEOUT_S = 60.0
"""Within which all ranks are connected. A store looks up the name of each host that
connects, and answers nobody meanwhile: for seconds, where no name server answers.
"""
STOPPED = "T"  # in proc(5): by a signal, unlike "t", by a debugger
MAX_FAILED_JOIN_S = 5.0  # for a thread whose question has failed, as after `hang_up`
TOKEN_BYTES = 16
IPV4_IN_IPV6 = "::ffff:"
CONNECTED_KEY = "connected"
LOST_KEY = "lost"


def is_stopped(pid: int) -> bool:
    """Returns whether a process of this host was stopped by a signal, such as SIGSTOP."""
    return _state(pid) == STOPPED


def is_visible(pid: int) -> bool:
    """Returns whether this process can see the state of another one.

    It cannot where the other one is in another PID namespace, or on other systems than
    Linux.
    """
    return _state(pid) != ""


def _state(pid: int) -> str:
    try:
        told = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return ""
    try:
        # The name before it, in parentheses, may have any characters.
        return os.read(told, 512).rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""
    finally:
        os.close(told)


class Address(NamedTuple):
    """Where a rank answers.

    Attributes:
        host: its IP address.
        port: its port.
        token: a key that only this rank's store has. Another process may have the same
            address in another network.
        askers: number of ranks that connect to it.
    """

    host: str
    port: int
    token: str
    askers: int


class Answers:
    """The answers of this rank to others that ask whether it runs.

    Args:
        group_store: the store of the process group.
        askers: number of ranks that will ask.

    Raises:
        RuntimeError: this process cannot listen at any port.
    """

    def __init__(self, group_store: Any, askers: int):
        self._store = c10d.TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False
        )
        host, token = _own_host(group_store), secrets.token_hex(TOKEN_BYTES)
        self._store.set(token, "")
        self.address = Address(host, self._store.port, token, askers)

    def tell_lost(self, rank: int, how: str) -> None:
        """Tells who asks from now on that this rank has lost another one.

        Args:
            rank: the lost rank.
            how: what was noticed of it.
        """
        with suppress(RuntimeError):
            self._store.set(LOST_KEY, json.dumps((rank, how)))


def open_answers(
    group_store: Any,
    askers: int,
    gather: Callable[[Address | None], list[Address | None]],
) -> tuple[Answers | None, dict[int, Address]]:
    """Returns the answers of this rank, and the addresses of all ranks. Collective.

    A rank that cannot listen has none, and warns.

    Args:
        group_store: the store of the process group.
        askers: number of ranks that will ask this one.
        gather: returns an object of each rank, in rank order.
    """
    own: Answers | None = None
    try:
        own = Answers(group_store, askers)
    except RuntimeError as e:
        log.warning("other hosts cannot ask this rank whether it runs: %s", e)
    addresses = gather(None if own is None else own.address)
    return own, {rank: at for rank, at in enumerate(addresses) if at is not None}


class Peer:
    """Another rank, to be asked. All here waits until it answers, however long.

    Args:
        address: of the other rank.

    Raises:
        OSError: nothing listens there, or something else.
        RuntimeError: the other rank has just ended.
    """

    def __init__(self, address: Address):
        # A connection that fails is told here in fewer words than by the store.
        with socket.create_connection(address[:2], CONNECT_TIMEOUT_S):
            pass
        self._store = c10d.TCPStore(
            address.host,
            address.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=OPEN_TIMEOUT_S),
        )
        if not self._store.check([address.token]):
            raise OSError("another process answers there")
        self._store.add(CONNECTED_KEY, 1)
        self._askers = address.askers

    def is_open(self) -> bool:
        """Returns whether all ranks that will ask the other one are connected to it.

        Raises:
            RuntimeError: the other rank has ended.
        """
        return int(self._store.add(CONNECTED_KEY, 0)) >= self._askers

    def lost(self) -> tuple[int, str] | None:
        """Returns the rank that the other one has lost, and how, if any.

        Raises:
            RuntimeError: the other rank has ended.
        """
        if not self._store.check([LOST_KEY]):
            return None
        rank, how = json.loads(self._store.get(LOST_KEY))
        return rank, how


def store_hosts(store: Any) -> list[tuple[str, int]]:
    """Returns the IP addresses and the port of a store that is reached by TCP, if any."""
    tcp = _tcp_store(store)
    if tcp is None:
        return []
    with suppress(OSError):
        found = socket.getaddrinfo(tcp.host, tcp.port, type=socket.SOCK_STREAM)
        return [(str(name[0]), int(name[1])) for *_, name in found]
    return []


def hang_up(host: str, port: int) -> None:
    """Ends the connections of this process to a store; a question to it then fails.

    The store has no way to do so. On other systems than Linux this does nothing.

    Args:
        host: Its IP address.
        port: Its port.
    """
    for name in _listed("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            peer, peer_port = found.getpeername()[:2]
            if (peer.removeprefix(IPV4_IN_IPV6), peer_port) == (host, port):
                found.shutdown(socket.SHUT_RDWR)


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _own_host(group_store: Any) -> str:
    """Returns the address by which other ranks reach this host.

    It is that of the network interface that gloo is told to use, or else of the one
    that leads to the host of the group's store.
    """
    with suppress(ImportError, OSError):
        return _interface_host(os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0])
    tcp = _tcp_store(group_store)
    host, port = (tcp.host, tcp.port) if tcp is not None else (socket.gethostname(), 1)
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as route:
            route.connect(address)  # finds the route, and sends nothing
            return str(route.getsockname()[0])
    return "127.0.0.1"


def _tcp_store(store: Any) -> Any:
    """Returns the store by TCP that a store is a part of, if it is one."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, c10d.TCPStore) else None


def _interface_host(name: str) -> str:
    """Returns the IPv4 address of a network interface; raises `OSError` if it has none."""
    import fcntl  # not on Windows

    get_address, address = 0x8915, slice(20, 24)  # SIOCGIFADDR, in struct ifreq
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(
            any_socket, get_address, name.encode()[:15].ljust(40, b"\0")
        )
    return socket.inet_ntoa(request[address])
