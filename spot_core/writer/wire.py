"""Frames between trainer and writer over a Unix stream socket.

A frame is two little-endian 32-bit lengths, a JSON object, and a payload of raw bytes; one file descriptor may ride
along (SCM_RIGHTS) with the lengths. Not pickle: a frame can carry values and nothing that runs.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LENGTHS = struct.Struct("<II")
_FD_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)


@dataclass(frozen=True)
class Frame:
    """One message. `fd` is a descriptor that the receiver owns from here on."""

    op: str
    fields: Mapping[str, Any]
    payload: bytes = b""
    fd: int | None = None


class Wire:
    """One end of the socket. `send` may be called by several threads, `receive` by one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_lock = threading.Lock()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, op: str, payload: bytes = b"", fd: int | None = None, **fields: Any) -> None:
        """Send one frame. Raises OSError (a broken pipe, mostly) when the other end is gone."""
        head = json.dumps({"op": op, **fields}).encode()
        lengths = _LENGTHS.pack(len(head), len(payload))
        with self._send_lock:
            if fd is None:
                self._sock.sendall(lengths + head)
            else:
                sent = socket.send_fds(self._sock, [lengths], [fd])
                self._sock.sendall(lengths[sent:] + head)
            if payload:
                self._sock.sendall(payload)

    def receive(self) -> Frame | None:
        """Block for the next frame; None when the other end closed (also in the middle of a frame)."""
        lengths, fd = self._receive_lengths()
        if lengths is None:
            return None
        head_size, payload_size = _LENGTHS.unpack(lengths)
        head, payload = self._receive_exactly(head_size), self._receive_exactly(payload_size)
        if head is None or payload is None:
            if fd is not None:
                os.close(fd)
            return None
        fields = json.loads(head)
        return Frame(fields.pop("op"), fields, payload, fd)

    def hung_up(self) -> bool:
        """Whether the other end is closed already, also when nobody has received its end-of-file yet."""
        poll = select.poll()
        try:
            poll.register(self._sock.fileno(), 0)  # hang-ups are told without asking for any event
        except (ValueError, OSError):
            return True  # closed on this side
        return bool(poll.poll(0))

    def close(self) -> None:
        self._sock.close()

    def _receive_lengths(self) -> tuple[bytes | None, int | None]:
        lengths, fd = b"", None
        while len(lengths) < _LENGTHS.size:
            try:
                part, ancillary, _, _ = self._sock.recvmsg(_LENGTHS.size - len(lengths), _FD_SPACE)
            except ConnectionError:
                return None, None
            if not part:
                return None, None
            lengths += part
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fd = array.array("i", data)[0]
        return lengths, fd

    def _receive_exactly(self, size: int) -> bytes | None:
        received = bytearray(size)
        view, have = memoryview(received), 0
        while have < size:
            try:
                count = self._sock.recv_into(view[have:])
            except ConnectionError:
                return None
            if not count:
                return None
            have += count
        return bytes(received)
