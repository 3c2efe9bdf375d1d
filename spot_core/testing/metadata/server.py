"""The part that all fakes share: an HTTP server in threads, a record of requests, and faults to order."""

from __future__ import annotations

import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from spot_core.clock import SYSTEM_CLOCK, Clock

Self = TypeVar("Self", bound="MetadataServer")


@dataclass(frozen=True)
class Request:
    """``headers`` have lower-case names; ``query`` holds the first value of each."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Fault:
    kind: str
    left: int
    method: str | None
    path: str | None
    reply: Reply | None = None

    def hits(self, request: Request) -> bool:
        return (
            self.left > 0
            and (self.method is None or self.method == request.method)
            and (self.path is None or self.path in request.path)
        )


class MetadataServer(ABC):
    """Subclasses answer requests; the test orders faults with `fail`, `garble`, `reset`, `hang`.

    Every fault takes ``method`` (``"PUT"``) and ``path`` (a part of it) to pick requests, and ``times``.
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.requests: list[Request] = []
        self.connections = 0
        self._faults: list[_Fault] = []
        self._released = threading.Event()
        self._arrived = threading.Condition()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @abstractmethod
    def answer(self, request: Request) -> Reply:
        """What the healthy service says."""

    @property
    def host(self) -> str:
        """``127.0.0.1:port``."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    @property
    def released(self) -> threading.Event:
        """Set when the server closes: for answers that wait."""
        return self._released

    def fail(self, status: int, times: int = 1, *, method: str | None = None, path: str | None = None) -> None:
        """Answer with an error status (503 and 429 bursts, 403 for a service that is switched off)."""
        self._faults.append(_Fault("reply", times, method, path, Reply(status, "<html>no</html>")))

    def garble(self, body: str, times: int = 1, *, method: str | None = None, path: str | None = None) -> None:
        """Answer 200 with a body that is not what it should be."""
        self._faults.append(_Fault("reply", times, method, path, Reply(200, body)))

    def reset(self, times: int = 1, *, method: str | None = None, path: str | None = None) -> None:
        """Reset the connection instead of answering."""
        self._faults.append(_Fault("reset", times, method, path))

    def hang(self, times: int = 10**9, *, method: str | None = None, path: str | None = None) -> None:
        """Do not answer until the server closes (a PUT behind a hop limit of 1)."""
        self._faults.append(_Fault("hang", times, method, path))

    def heal(self) -> None:
        """Forget all faults."""
        self._faults.clear()

    def paths(self, method: str = "GET") -> list[str]:
        return [request.path for request in self.requests if request.method == method]

    def wait_for_requests(self, count: int, timeout_s: float = 10.0) -> bool:
        """Wait until ``count`` requests came in all; False after ``timeout_s``."""
        with self._arrived:
            return self._arrived.wait_for(lambda: len(self.requests) >= count, timeout_s)

    def note(self, request: Request) -> None:
        with self._arrived:
            self.requests.append(request)
            self._arrived.notify_all()

    def fault(self, request: Request) -> _Fault | None:
        for fault in self._faults:
            if fault.hits(request):
                fault.left -= 1
                return fault
        return None

    def __enter__(self: Self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in mid-answer is part of the tests."""


def _handler(fake: MetadataServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            fake.connections += 1

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            request = Request(
                method=self.command,
                path=parts.path,
                query={name: values[0] for name, values in parse_qs(parts.query).items()},
                headers={name.lower(): value for name, value in self.headers.items()},
                body=self.rfile.read(int(self.headers.get("Content-Length") or 0)),
            )
            fault = fake.fault(request)
            fake.note(request)
            if fault is not None and fault.kind == "reset":
                self._reset()
                return
            if fault is not None and fault.kind == "hang":
                fake.released.wait()
                self._reset()
                return
            reply = fault.reply if fault is not None and fault.reply is not None else fake.answer(request)
            body = reply.body.encode()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _reset(self) -> None:
            # A linger time of zero makes close() send RST instead of FIN.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()

        do_GET = do_PUT = do_POST = _serve

    return Handler
