"""An object store that costs next to nothing: `python -m tests.bench.sink PORT [discard]`.

It speaks as much of S3's protocol, and of GCS's (`sink_gcs`), as the clients under test use, checks no signature and no
digest, and keeps parts as they came, in memory; or, to ``discard``, reads them and keeps their sizes. So what limits is
the client. ``GET /?stats`` tells the bytes that went either way since it was last asked.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.bench.sink_gcs import GcsApi

_NS = "<?xml version='1.0' encoding='UTF-8'?>"
BIG = 1 << 16
THROWN_AWAY = "x-thrown-away"
"""A header of `sink_tls`: how long the body was that it took in the sink's place."""


class Gone:
    """In place of bytes that were thrown away."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


class Sink:
    def __init__(self, port: int, *, discards: bool) -> None:
        self._objects: dict[str, bytearray | Gone] = {}
        self._uploads: dict[str, dict[int, bytearray | Gone]] = {}
        self._gcs = GcsApi(self._objects, _joined)
        self._discards = discards
        self._lock = threading.Lock()
        self._sent = self._received = 0
        self._listener = socket.create_server(("127.0.0.1", port), backlog=64)

    def serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._connection, args=(connection,), daemon=True).start()

    def _connection(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            while True:
                try:
                    first = stream.readline().decode("latin-1").split()
                    headers = dict(read_headers(stream))
                    if len(first) != 3:
                        return
                    if headers.get("expect", "").lower() == "100-continue":
                        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                    length = int(headers.get(THROWN_AWAY, headers.get("content-length", 0)))
                    body: bytearray | Gone
                    if self._discards and length >= BIG:
                        if THROWN_AWAY not in headers:
                            throw_away(connection, stream, length)
                        body = Gone(int(headers.get("x-amz-decoded-content-length", length)))
                    else:
                        coded = bytearray(length)
                        stream.readinto(coded)
                        body = _plain(coded, headers)
                    answer = self._gcs.answer if GcsApi.serves(first[1]) else self._answer
                    status, extra, reply = answer(first[0], first[1], headers, body)
                    head = f"HTTP/1.1 {status}\r\n{extra}Content-Length: {len(reply)}\r\n\r\n".encode()
                    connection.sendall(head)
                    if first[0] != "HEAD":
                        connection.sendall(reply)
                        self._sent += len(reply)
                    self._received += len(body)
                except (ConnectionError, OSError):
                    return

    def _answer(
        self, method: str, target: str, headers: dict[str, str], body: bytearray | Gone
    ) -> tuple[str, str, bytes | memoryview | Gone]:
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        key = unquote(parts.path)
        tag = 'ETag: "0"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n'
        if "stats" in query:
            told = json.dumps({"sent": self._sent, "received": self._received}).encode()
            self._sent = self._received = 0
            return "200 OK", "", told
        if method == "POST" and "uploads" in query:
            with self._lock:
                name = f"u{len(self._uploads)}"
                self._uploads[name] = {}
            return "200 OK", "", _xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
        if method == "POST" and "uploadId" in query:
            numbered = self._uploads[query["uploadId"]]
            self._objects[key] = _joined([numbered[number] for number in sorted(numbered)])
            numbered.clear()
            return "200 OK", "", _xml("CompleteMultipartUploadResult", '<ETag>"0"</ETag>')
        if method == "PUT" and "partNumber" in query:
            self._uploads[query["uploadId"]][int(query["partNumber"])] = body
            return "200 OK", tag, b""
        if method == "PUT" and (source := headers.get("x-amz-copy-source")):
            self._objects[key] = self._objects["/" + unquote(source).lstrip("/")]
            when = "<LastModified>2026-01-01T00:00:00Z</LastModified>"
            return "200 OK", "", _xml("CopyObjectResult", f'<ETag>"0"</ETag>{when}')
        if method == "PUT":
            if headers.get("if-none-match") == "*" and key in self._objects:
                return "412 Precondition Failed", "", _xml("Error", "<Code>PreconditionFailed</Code>")
            self._objects[key] = body
            return "200 OK", tag, b""
        if method == "GET" and ("list-type" in query or "prefix" in query):
            return "200 OK", "", self._listing(key.strip("/"), query)
        if method == "DELETE":
            self._objects.pop(key, None)
            return "204 No Content", "", b""
        if key not in self._objects:
            return "404 Not Found", "", _xml("Error", "<Code>NoSuchKey</Code>")
        whole = self._objects[key]
        if isinstance(whole, Gone):
            return "200 OK", tag, whole  # enough for a HEAD
        data = memoryview(whole)
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        if found is None:
            return "200 OK", tag, data
        start, end = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
        return "206 Partial Content", f"{tag}Content-Range: bytes {start}-{end}/{len(data)}\r\n", data[start : end + 1]

    def _listing(self, bucket: str, query: dict[str, str]) -> bytes:
        prefix, cut = query.get("prefix", ""), query.get("delimiter", "")
        root = f"/{bucket}/"
        keys = [key[len(root) :] for key in sorted(self._objects) if key.startswith(root + prefix)]
        below = {key[: key.index(cut, len(prefix)) + 1] for key in keys if cut and cut in key[len(prefix) :]}
        here = [key for key in keys if not any(key.startswith(folder) for folder in below)]
        text = "".join(
            f'<Contents><Key>{key}</Key><Size>{len(self._objects[f"/{bucket}/{key}"])}</Size><ETag>"0"</ETag>'
            "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
            for key in here
        )
        text += "".join(f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>" for folder in sorted(below))
        return _xml("ListBucketResult", f"<KeyCount>{len(here)}</KeyCount><IsTruncated>false</IsTruncated>{text}")


def _joined(parts: list[bytearray | Gone]) -> bytearray | Gone:
    if any(isinstance(part, Gone) for part in parts):
        return Gone(sum(map(len, parts)))
    return bytearray().join(part for part in parts if not isinstance(part, Gone))


def throw_away(connection: socket.socket, stream: Any, length: int) -> None:
    """Take `length` bytes off the connection, of which `stream` may hold some."""
    length -= len(stream.read(min(length, len(stream.peek()))))
    scratch = bytearray(min(length, 1 << 20))
    while length:
        count = connection.recv_into(scratch, min(length, len(scratch)))
        if not count:
            raise ConnectionError("the client is gone")
        length -= count


def _xml(name: str, inner: str) -> bytes:
    return f"{_NS}<{name}>{inner}</{name}>".encode()


def read_headers(stream: object) -> Iterator[tuple[str, str]]:
    while line := stream.readline().decode("latin-1").strip():  # type: ignore[attr-defined]
        name, value = line.split(":", 1)
        yield name.strip().lower(), value.strip()


def _plain(body: bytearray, headers: dict[str, str]) -> bytearray:
    """The payload out of the aws-chunked coding that botocore uses with trailing digests."""
    chunked = "aws-chunked" in headers.get("content-encoding", "")
    if not chunked and not headers.get("x-amz-content-sha256", "").startswith("STREAMING"):
        return body
    found, at = bytearray(), 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(bytes(body[at:end]).split(b";")[0], 16)
        if size == 0:
            return found
        found += memoryview(body)[end + 2 : end + 2 + size]
        at = end + 2 + size + 2


if __name__ == "__main__":
    Sink(int(sys.argv[1]), discards="discard" in sys.argv[2:]).serve()
