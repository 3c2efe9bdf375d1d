"""TLS in front of the sink, as every real store has it: `python -m tests.bench.sink_tls PORT CERTIFICATE SINK_PORT`.

Each connection has a process of its own: threads would take turns, 16 KiB at a time, and be slower than any client. It
takes the body of an upload off the wire, decrypts it and throws it away; the sink hears only how long it was.
"""

from __future__ import annotations

import socket
import socketserver
import ssl
import sys
from collections.abc import Iterator
from typing import Any

from tests.bench.sink import BIG, THROWN_AWAY, read_headers, throw_away


class Front(socketserver.ForkingTCPServer):
    allow_reuse_address = True
    request_queue_size = 64
    max_children = 256

    def __init__(self, port: int, certificate: str, behind: int) -> None:
        self.behind = ("127.0.0.1", behind)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate)
        super().__init__(("127.0.0.1", port), _Connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no news."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Connection(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True
    server: Front

    def setup(self) -> None:
        super().setup()
        self.connection = self.server.context.wrap_socket(self.request, server_side=True)
        self.rfile = self.connection.makefile("rb")

    def handle(self) -> None:
        with socket.create_connection(self.server.behind) as behind, behind.makefile("rb") as replies:
            while first := self.rfile.readline():
                headers = dict(read_headers(self.rfile))
                if headers.pop("expect", "").lower() == "100-continue":
                    self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = self._body(headers)
                headers["content-length"] = str(len(body))
                lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                behind.sendall(b"%b%b\r\n%b" % (first, lines.encode("latin-1"), body))
                self._pass_on(replies, has_body=not first.startswith(b"HEAD "))

    def _body(self, headers: dict[str, str]) -> bytes:
        """What is passed on of a body; of a large one `headers` tell how long it was."""
        length = int(headers.get("x-amz-decoded-content-length", headers.get("content-length", 0)))
        kept = list[bytes]()
        for size in self._pieces(headers):
            if length < BIG:
                kept.append(self.rfile.read(size))
            else:
                throw_away(self.connection, self.rfile, size)
                headers[THROWN_AWAY] = str(length)
        return b"".join(kept)

    def _pieces(self, headers: dict[str, str]) -> Iterator[int]:
        """Sizes of what the body comes in; botocore sends it in chunks by https, around a coding of its own."""
        if headers.pop("transfer-encoding", "") != "chunked":
            yield int(headers.get("content-length", 0))
            return
        while size := int(self.rfile.readline(), 16):
            yield size
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def _pass_on(self, replies: Any, *, has_body: bool) -> None:
        lines = [replies.readline()]
        while lines[-1].strip():
            lines.append(replies.readline())
        told = next(line for line in lines if line.lower().startswith(b"content-length:"))
        size = int(told.split(b":")[1]) if has_body else 0
        self.connection.sendall(b"".join(lines) + replies.read(size))


if __name__ == "__main__":
    Front(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])).serve_forever()
