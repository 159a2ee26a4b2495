"""Packets and messages of a channel between two ranks of one host."""

from __future__ import annotations

import mmap
import socket
import struct
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from hetconv.errors import DisagreementError

PACKET = struct.Struct("<BQQIQ")


DESCRIPTOR = struct.Struct("i")  # of a file


ANCILLARY_BYTES = socket.CMSG_LEN(DESCRIPTOR.size)  # a packet, in bytes


Memory = mmap.mmap | bytearray


Shape = tuple[int, ...]


class PacketKind(IntEnum):
    """Kind of a packet.

    A packet has the offset of a message in bytes, how many of the oldest messages were read
    since the last packet, and a tag.
    """

    MEMORY = 0  # comes with it, for all messages from now on
    MESSAGE = 1  # lies there
    TAKEN = 2  # are so many, and there is nothing else to say; nowhere
    MISMATCH = 3  # are the two ranks: what the sender does lies there, as text


class CallMismatchError(DisagreementError):
    """The two ranks of a channel are in different calls."""


class Region(NamedTuple):
    """Bytes from ``start`` to ``stop`` of a memory."""

    start: int
    stop: int


class Message(NamedTuple):
    """Where a message is, and the tag of the call that it belongs to."""

    memory: Memory
    start: int
    stop: int
    tag: int


class PendingReceive:
    """A message that is expected.

    Attributes:
        number: counts all messages of the channel.
        dtype: of the message.
        shape: of the message.
        buffer: the message, once it was read.
        tag: of the call that the message must belong to.
    """

    __slots__ = ("buffer", "dtype", "number", "shape", "tag")

    def __init__(
        self,
        number: int,
        dtype: torch.dtype,
        shape: Shape,
        buffer: Tensor | None,
        tag: int,
    ):
        self.number, self.dtype, self.shape, self.buffer, self.tag = (
            number,
            dtype,
            shape,
            buffer,
            tag,
        )
