"""Frames arrive whole, with their descriptor, and a closed end is an end and not an error."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spot_core.writer.wire import Wire


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    a, b = (Wire(sock) for sock in socket.socketpair())
    yield a, b
    a.close()
    b.close()


def test_frames_keep_their_order_fields_and_payload(wires: tuple[Wire, Wire]) -> None:
    ours, theirs = wires
    payload = os.urandom(5_000_000)  # more than the socket's buffer
    sender = threading.Thread(target=lambda: (ours.send("a", x=1), ours.send("b", payload, y=[2]), ours.send("c")))
    sender.start()
    frames = [theirs.receive() for _ in range(3)]
    sender.join()
    assert [(frame.op, frame.fields, frame.payload) for frame in frames if frame] == [
        ("a", {"x": 1}, b""),
        ("b", {"y": [2]}, payload),
        ("c", {}, b""),
    ]


def test_a_descriptor_rides_along(wires: tuple[Wire, Wire], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    with (tmp_path / "a").open("rb") as file:
        wires[0].send("before")
        wires[0].send("file", fd=file.fileno())
    first, second = wires[1].receive(), wires[1].receive()
    assert first is not None
    assert second is not None
    assert first.fd is None
    assert second.fd is not None
    with os.fdopen(second.fd, "rb") as received:
        assert received.read() == b"hello"


@pytest.mark.parametrize("bytes_sent", [0, 3, 8, 12])
def test_an_end_in_the_middle_of_a_frame_is_the_end(bytes_sent: int) -> None:
    a, b = socket.socketpair()
    wire = Wire(b)
    with a:
        a.sendall((bytes([20, 0, 0, 0, 0, 0, 0, 0]) + b'{"op"')[:bytes_sent])
    assert wire.receive() is None
    wire.close()


def test_a_closed_end_shows_before_anything_is_received(wires: tuple[Wire, Wire]) -> None:
    ours, theirs = wires
    theirs.send("last words")
    assert not ours.hung_up()
    theirs.close()
    assert ours.hung_up()
    frame = ours.receive()
    assert frame is not None
    assert frame.op == "last words"
    ours.close()
    assert ours.hung_up()
