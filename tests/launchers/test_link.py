"""The link delivers messages whole and in order, and each side notices when the other is gone."""

import contextlib
import os
import struct
import threading

import pytest

from autotune.launchers import link
from autotune.launchers.link import Link, LinkLost
from tests.support.waiting import wait_until


@pytest.fixture
def pipes():
    """Returns file descriptors (read, write) for each of two connected sides; closes those that are still open."""
    there, back = os.pipe(), os.pipe()
    yield (back[0], there[1]), (there[0], back[1])
    for descriptor in (*there, *back):
        with contextlib.suppress(OSError):
            os.close(descriptor)


@pytest.fixture
def links(pipes):
    ours, theirs = Link(*pipes[0]), Link(*pipes[1])
    yield ours, theirs
    ours.close()
    theirs.close()


def frame(data):
    return struct.pack(">I", len(data)) + data


def test_messages_arrive_in_order_and_unchanged(links):
    ours, theirs = links
    sent = [{"do": "start", "id": n, "env": {"A": "ü\n\0", "B": "\udcff"}, "value": [1.5, None, True]} for n in range(3)]
    for message in sent:
        ours.send(message)
    assert [theirs.receive(5.0) for _ in sent] == sent
    assert ours.receive(0.0) is None


def test_large_messages_can_be_sent_in_both_directions_at_once(links):
    large = {"text": "x" * (4 << 20)}  # much more than a pipe's buffer
    senders = [threading.Thread(target=one.send, args=(large,)) for one in links]
    for sender in senders:
        sender.start()
    assert [one.receive(20.0) for one in links] == [large, large]
    for sender in senders:
        sender.join()


def test_output_before_the_start_of_the_link_is_skipped(pipes):
    (read, write), (_, their_write) = pipes
    ours = Link(read, write)
    os.write(their_write, b"Welcome to the cluster!\nquota: 3 %\n" + link.START[:5])
    os.write(their_write, link.START + frame(b'{"is": "hello"}'))
    assert ours.receive(5.0) == {"is": "hello"}
    ours.close()


def test_message_sent_before_the_link_closed_still_arrives(links):
    ours, theirs = links
    theirs.send({"is": "ended"})
    theirs.close()
    assert ours.receive(5.0) == {"is": "ended"}
    for _ in range(2):
        with pytest.raises(LinkLost, match="closed the link"):
            ours.receive(5.0)
    assert ours.is_lost
    with pytest.raises(LinkLost, match="closed the link"):
        ours.send({"do": "anything"})


@pytest.mark.parametrize(
    "data",
    [frame(b"[1]"), frame(b"nonsense"), frame(b"\xff"), struct.pack(">I", link.MAX_BYTES + 1), frame(b"[" * 100_000)],
)
def test_link_closes_on_an_invalid_message(pipes, data):
    (read, write), (_, their_write) = pipes
    ours = Link(read, write)
    with open(their_write, "wb", closefd=False) as file:
        file.write(link.START + data)
    with pytest.raises(LinkLost):
        ours.receive(5.0)
    ours.close()


def test_send_fails_if_the_other_side_does_not_read(pipes, monkeypatch):
    monkeypatch.setattr(link, "WRITE_S", 0.2)
    ours = Link(*pipes[0])
    with pytest.raises(LinkLost, match="has not read"):
        ours.send({"text": "x" * (1 << 20)})
    ours.close()


def test_heartbeats_reset_the_time_of_silence(pipes, monkeypatch):
    monkeypatch.setattr(link, "BEAT_S", 0.05)
    ours, theirs = Link(*pipes[0]), Link(*pipes[1])
    assert ours.receive(0.5) is None  # heartbeats are not messages
    wait_until(lambda: ours.silent_s < 0.4, "a heartbeat")
    theirs._is_closed = True  # its thread ends at the next heartbeat, as if the process were stopped
    theirs._thread.join()
    assert ours.receive(0.5) is None
    assert ours.silent_s > 0.4
    theirs._is_closed = False
    for one in (ours, theirs):
        one.close()


def test_heartbeats_after_a_wrong_length_are_silence_but_parts_of_a_message_are_not(pipes):
    (read, write), (_, their_write) = pipes
    ours = Link(read, write)
    os.write(their_write, link.START + struct.pack(">I", 1 << 20))
    for _ in range(8):
        os.write(their_write, frame(b'{"is": "beat"}'))
        assert ours.receive(0.05) is None
    silent_s = ours.silent_s
    assert silent_s > 0.3
    os.write(their_write, b" " * 1000)
    wait_until(lambda: ours.silent_s < silent_s, "the part of a message")
    assert ours.receive(0.05) is None
    ours.close()
