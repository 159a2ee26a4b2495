"""Channels between two ranks of a host: what is sent comes, in order and bit by bit, or
an error says that it will not.

Both ends are in this process; `test_exchange` has ranks use them.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetconv.comm import shared_memory
from hetconv.comm.shared_memory import Channel
from hetconv.errors import DisagreementError

MINUTE = timedelta(minutes=1)
MOMENT = timedelta(seconds=0.05)


def pair(timeout: timedelta = MINUTE) -> tuple[Channel, Channel]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(here, timeout), Channel(there, timeout)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    here, there = pair()
    yield here, there
    here.close()
    there.close()


def passed(sender: Channel, receiver: Channel, piece: Tensor) -> Tensor:
    sender.send(piece)
    buffer = torch.empty_like(piece, memory_format=torch.contiguous_format)
    receiver.receive_into(buffer)()
    return buffer


@pytest.mark.parametrize(
    "piece",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(2, 3, 4)[:, 1:, ::2],
        torch.arange(5, dtype=torch.float64).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.tensor(3.0),
        torch.empty(0, 3),
    ],
    ids=["contiguous", "a view", "bfloat16", "bool", "complex", "a number", "nothing"],
)
def test_a_piece_comes_as_it_is(ends: tuple[Channel, Channel], piece: Tensor) -> None:
    here, there = ends
    assert torch.equal(passed(here, there, piece), piece)
    assert torch.equal(passed(there, here, piece), piece)


def test_what_is_sent_may_be_written_to_at_once(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    piece, buffer = torch.ones(10), torch.zeros(10)
    here.send(piece)
    piece.zero_()
    there.receive_into(buffer)()
    assert bool((buffer == 1).all())


def test_messages_come_in_order_whichever_is_waited_for_first(
    ends: tuple[Channel, Channel],
) -> None:
    here, there = ends
    buffers = [torch.zeros(3) for _ in range(4)]
    first, second = there.receive_into(buffers[0]), there.receive_into(buffers[1])
    for k in range(4):
        here.send(torch.full((3,), float(k + 1)))
    second()
    assert [float(b[0]) for b in buffers] == [1, 2, 0, 0]
    first()
    third, fourth = there.receive_into(buffers[2]), there.receive_into(buffers[3])
    fourth()
    third()
    assert [float(b[0]) for b in buffers] == [1, 2, 3, 4]


def test_what_is_lent_stays_where_it_lies_until_it_is_given_back(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "INITIAL_BYTES", 256)
    monkeypatch.setattr(shared_memory, "MAX_UNACKNOWLEDGED", 0)
    here, there = ends
    lent = []
    for k in range(3):
        here.send(torch.full((32,), float(k)))
        lent.append(there.borrow(there.post_receive(torch.float32, (32,))))
        here.send(torch.full((32,), 9.0))
        assert lent[k].tolist() == [k] * 32
        there.release()
        passed(there, here, torch.zeros(1))
        there.take(there.post_receive(torch.float32, (32,)))
    assert lent[0].data_ptr() == lent[2].data_ptr()  # not a copy


def test_what_is_to_be_lent_was_taken_by_who_waited_for_more(
    ends: tuple[Channel, Channel],
) -> None:
    here, there = ends
    first, second = (there.post_receive(torch.float32, (3,)) for _ in range(2))
    for k in range(2):
        here.send(torch.full((3,), float(k)))
    assert there.take(second).tolist() == [1.0] * 3
    assert there.borrow(first).tolist() == [0.0] * 3
    there.release()  # of nothing
    assert torch.equal(passed(here, there, torch.ones(2)), torch.ones(2))


def test_a_message_of_another_length_is_not_taken_for_the_expected_one(
    ends: tuple[Channel, Channel],
) -> None:
    here, there = ends
    here.send(torch.zeros(3))
    with pytest.raises(
        DisagreementError,
        match=r"12 bytes came where one of 8 was expected.* call the same on every",
    ):
        there.receive_into(torch.zeros(2))()


class Ends:
    """Both ends of a channel, and what is on its way, by a list."""

    def __init__(self) -> None:
        self.here, self.there = pair()
        self.on_its_way: deque[Tensor] = deque()

    def send(self, size: int) -> None:
        piece = torch.randint(256, (size,), dtype=torch.uint8)
        self.here.send(piece)
        self.on_its_way.append(piece)

    def take(self, _: int) -> None:
        if self.on_its_way:
            piece = self.on_its_way.popleft()
            assert torch.equal(
                self.there.take(
                    self.there.post_receive(piece.dtype, tuple(piece.shape))
                ),
                piece,
            )

    def borrow(self, size: int) -> None:
        """While another message is sent."""
        if self.on_its_way:
            piece = self.on_its_way.popleft()
            lent = self.there.borrow(
                self.there.post_receive(piece.dtype, tuple(piece.shape))
            )
            self.send(size)
            assert torch.equal(lent, piece)
            self.there.release()


DO = [Ends.send, Ends.send, Ends.take, Ends.borrow]
STEPS = st.lists(st.tuples(st.sampled_from(DO), st.integers(0, 700)), max_size=60)


@settings(max_examples=200)
@given(STEPS)
def test_any_messages_under_way_at_once_keep_what_they_say(
    steps: list[tuple[Callable[[Ends, int], None], int]],
) -> None:
    """In memory so small that its gaps are filled, and it is outgrown."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shared_memory, "INITIAL_BYTES", 1024)
        ends = Ends()
        for do, size in steps:
            do(ends, size)
        while ends.on_its_way:
            ends.take(0)


def test_memory_does_not_grow_while_messages_are_taken(
    ends: tuple[Channel, Channel],
) -> None:
    here, there = ends
    for _ in range(40):
        passed(here, there, torch.zeros(100_000))
    assert len(here._out) <= 2 * (shared_memory.MAX_UNACKNOWLEDGED_BYTES + 400_000)
    passed(here, there, torch.zeros(1_000_000))
    assert len(here._out) >= 4_000_000


def test_messages_lie_where_earlier_ones_lay(ends: tuple[Channel, Channel]) -> None:
    """Though that the last one was taken is not known yet: caches hold the memory of two."""
    here, there = ends
    lay = set()
    for _ in range(100):
        passed(here, there, torch.zeros(5_000))
        passed(there, here, torch.zeros(1))
        passed(here, there, torch.zeros(5_000))
        lay |= {place.start for place in here._places}
    assert max(lay) < 2 * 20_000 + shared_memory.CACHE_LINE_BYTES


def test_who_answers_tells_what_was_taken_with_the_answer(
    ends: tuple[Channel, Channel],
) -> None:
    here, there = ends
    for k in range(100):
        passed(here, there, torch.full((500,), float(k)))
        assert passed(there, here, torch.full((300,), -float(k)))[0] == -k
    assert [len(end._places) for end in ends] == [0, 1]
    assert [len(end._out) for end in ends] == [shared_memory.INITIAL_BYTES] * 2


def test_more_packets_than_a_socket_holds_wait_until_they_are_read(
    ends: tuple[Channel, Channel],
) -> None:
    here, there = ends
    buffers = [torch.zeros(1) for _ in range(2000)]

    def send() -> None:
        for k in range(len(buffers)):
            here.send(torch.tensor([float(k)]))

    sender = threading.Thread(target=send)
    sender.start()
    waits = [there.receive_into(b) for b in buffers]
    waits[-1]()
    sender.join()
    assert [int(b) for b in buffers] == list(range(len(buffers)))


def test_what_came_before_the_other_ended_can_be_read_and_no_more() -> None:
    here, there = pair()
    passed(there, here, torch.ones(1))  # whose receipt the one that ends has not read
    here.send(torch.ones(1))
    there.send(torch.ones(1))
    here.close()
    buffer = torch.zeros(1)
    there.receive_into(buffer)()
    assert buffer == 1
    with pytest.raises(ConnectionError, match="closed"):
        there.receive_into(buffer)()
    with pytest.raises(ConnectionError):
        there.send(buffer)


@pytest.mark.parametrize("what", ["message", "room for packets"])
def test_waiting_ends(what: str) -> None:
    here, _there = pair(MOMENT)

    def wait() -> None:
        if what == "message":
            here.receive_into(torch.empty(1))()
        while True:
            here.send(torch.empty(1))

    with pytest.raises(TimeoutError, match=r"nothing came within 0\.05 s"):
        wait()


@pytest.mark.parametrize("own", [True, False])
def test_a_receiver_sleeps_at_once_but_on_a_core_of_its_own(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    here, there = ends
    passed(here, there, torch.ones(1))  # memory for messages comes with the first one
    monkeypatch.setattr(shared_memory, "_own_core", lambda: own)
    monkeypatch.setattr(shared_memory, "MAX_SPIN_S", MINUTE.total_seconds())
    slept = list[float]()
    monkeypatch.setattr(
        shared_memory,
        "_wait",
        lambda poll, wait_ms, _: (slept.append(wait_ms), poll.poll(wait_ms)),
    )
    wait = there.receive_into(torch.zeros(1))
    sender = threading.Timer(0.05, here.send, [torch.ones(1)])
    sender.start()
    assert wait() == 1
    sender.join()
    assert slept == ([] if own else [6e4])


def test_who_has_looked_in_vain_sleeps(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_own_core", lambda: True)
    here, _there = ends
    assert not here._looked()
