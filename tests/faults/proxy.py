"""A proxy between a client and an HTTP object store that does to requests what networks do.

    with Proxy(server.port) as proxy:
        proxy.fault = lambda request: Reset() if request.is_part else None

`fault` is asked for each request, on the proxy's thread, and answers what happens to it; None passes it on. Everything
is real: sockets, resets, replies cut short.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qs, unquote, urlsplit

_NAMED = 4096
"""Bytes within which an upload to GCS tells its object's name."""


@dataclass(frozen=True)
class Request:
    method: str
    key: str
    """Bucket and key; of an upload to GCS the key, where it is told."""
    query: dict[str, list[str]]

    @property
    def is_part(self) -> bool:
        """Bytes of a big object: a part (S3), a block (Azure), a piece of a stream (GCS)."""
        if "upload_id" in self.query:
            return self.writes
        return self.method == "PUT" and bool(self.query.keys() & {"partNumber", "blockid"})

    @property
    def makes_visible(self) -> bool:
        """What ends the upload of a big object (on GCS its last piece does; this is the joining of parts)."""
        ends = self.method == "POST" and ("uploadId" in self.query or self.key.endswith("/compose"))
        return ends or self.query.get("comp") == ["blocklist"]

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and bool(self.query.keys() & {"list-type", "prefix", "comp"})

    @property
    def deletes(self) -> bool:
        """(Azure's client sends a batch.)"""
        return self.method == "DELETE" or self.query.get("comp") == ["batch"]

    @property
    def writes(self) -> bool:
        return self.method in ("PUT", "POST")


@dataclass(frozen=True)
class Reset:
    """The connection is reset in the middle of the request's body; the server never sees the whole of it."""


@dataclass(frozen=True)
class Answer:
    """The server answers at once, with an error of its own."""

    status: int
    code: str
    message: str = "injected"

    def reply(self) -> bytes:
        body = (
            f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{self.code}</Code>'
            f"<Message>{self.message}</Message></Error>"
        ).encode()
        head = f"HTTP/1.1 {self.status} Injected\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}"
        return f"{head}\r\n\r\n".encode() + body


@dataclass(frozen=True)
class Stall:
    """Nothing moves for so long; then all goes on."""

    seconds: float


@dataclass(frozen=True)
class Hold:
    """Nothing moves until the event is set, or for so long."""

    until: threading.Event
    seconds: float = 60.0


@dataclass(frozen=True)
class LoseReply:
    """The server does it, and the connection breaks before its reply comes."""


@dataclass(frozen=True)
class Truncate:
    """The reply breaks off in the middle of its body."""


@dataclass(frozen=True)
class Stale:
    """The reply to the first such request is given again (a listing that does not see what came since)."""


@dataclass(frozen=True)
class Corrupt:
    """One bit of the request's body turns over on the way."""


Fault = Corrupt | Reset | Answer | Stall | Hold | LoseReply | Truncate | Stale


@dataclass
class Proxy:
    upstream: int
    """Port of the server, on this machine."""
    fault: Callable[[Request], Fault | None] = field(default=lambda request: None)
    answered: Callable[[Request], None] = field(default=lambda request: None)
    """Told, on the proxy's thread, when the server has answered, before the client hears of it."""
    requests: list[Request] = field(default_factory=list)
    received: int = 0
    """Bytes of all replies' bodies."""
    port: int = 0
    _first: dict[tuple[str, str], bytes] = field(default_factory=dict)

    def __enter__(self) -> Proxy:
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()

        async def start() -> None:
            self._server = await asyncio.start_server(self._client, "127.0.0.1", 0, limit=1 << 20)
            self.port = self._server.sockets[0].getsockname()[1]
            ready.set()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(start())
            self._loop.run_forever()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

        self._thread = threading.Thread(target=run, name="fault-proxy", daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        # Cancelled: the proxy goes while a client still holds its connection.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if back is None:
                    back = await asyncio.open_connection("127.0.0.1", self.upstream, limit=1 << 20)
                if not await self._exchange(head, reader, writer, *back):
                    break
        writer.close()
        if back is not None:
            back[1].close()

    async def _exchange(
        self,
        head: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> bool:
        """One request and its reply; False when the connection is not to be used again."""
        request, headers = _parse(head)
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:"))
        length = int(headers.get("content-length", 0))
        begun = b""
        if "uploadType" in request.query:  # GCS: the name stands at the beginning of what is sent
            begun = await reader.readexactly(min(length, _NAMED))
            request = _named(request, begun)
        self.requests.append(request)
        fault = self.fault(request)
        if isinstance(fault, Reset):
            await reader.readexactly(max(0, length // 2 - len(begun)))
            _reset(writer)
            return False
        rest = {**headers, "content-length": str(length - len(begun))} if begun else headers
        body = begun + await _body(reader, rest)
        if isinstance(fault, Answer):
            writer.write(fault.reply())
            await writer.drain()
            return True
        if isinstance(fault, Stall):
            await asyncio.sleep(fault.seconds)
        if isinstance(fault, Hold):
            await asyncio.to_thread(fault.until.wait, fault.seconds)
        if isinstance(fault, Corrupt):
            body = body[: length // 2] + bytes([body[length // 2] ^ 1]) + body[length // 2 + 1 :]
        server_writer.write(head + body)
        await server_writer.drain()
        reply_head = await server_reader.readuntil(b"\r\n\r\n")
        # Where a server says to go on is behind the proxy as well.
        reply_head = reply_head.replace(f":{self.upstream}/".encode(), f":{self.port}/".encode())
        status, reply_headers = _parse_reply(reply_head)
        empty = request.method == "HEAD" or status in (204, 304)
        reply = b"" if empty else await _body(server_reader, reply_headers, until_end=True)
        self.answered(request)
        where = (request.method, f"{request.key}?{sorted(request.query.items())}")
        known = self._first.setdefault(where, reply_head + reply)
        if isinstance(fault, LoseReply):
            _reset(writer)
            return False
        if isinstance(fault, Truncate):
            writer.write(reply_head + reply[: len(reply) // 2])
            await writer.drain()
            _reset(writer)
            return False
        self.received += len(reply)
        writer.write(known if isinstance(fault, Stale) else reply_head + reply)
        await writer.drain()
        return "close" not in reply_headers.get("connection", "").lower()


def _parse(head: bytes) -> tuple[Request, dict[str, str]]:
    first, headers = _lines(head)
    method, target, _ = first.split(" ", 2)
    parts = urlsplit(target)
    return Request(method, unquote(parts.path).lstrip("/"), parse_qs(parts.query, keep_blank_values=True)), headers


def _named(request: Request, begun: bytes) -> Request:
    found = re.search(rb'"name": *"([^"]*)"', begun)
    return request if found is None else replace(request, key=found[1].decode())


def _parse_reply(head: bytes) -> tuple[int, dict[str, str]]:
    first, headers = _lines(head)
    return int(first.split(" ", 2)[1]), headers


def _lines(head: bytes) -> tuple[str, dict[str, str]]:
    first, *rest = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.split(":", 1) for line in rest)
    return first, {name.strip().lower(): value.strip() for name, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str], *, until_end: bool = False) -> bytes:
    """The body as it came over the wire."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        found = b""
        while True:
            line = await reader.readuntil(b"\r\n")
            found += line + await reader.readexactly(int(line.split(b";")[0], 16) + 2)
            if int(line.split(b";")[0], 16) == 0:
                return found
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return await reader.read() if until_end else b""


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
