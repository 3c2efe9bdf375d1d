"""Requests that end: torch's store client waits for an answer without a limit when the store's host hangs or vanishes.

So another thread waits for it, and the caller no longer than it likes. (`set_timeout` bounds some requests only.)
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

T = TypeVar("T")

_IDLE_S = 10.0


class Unanswered(RuntimeError):
    """No answer in time, to this request or to one before it."""


class Asking:
    """One request after the other, each for at most `answer_s`; the thread ends by itself when there are none."""

    def __init__(self, answer_s: float) -> None:
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._serving = False
        self._late: Future[Any] | None = None

    def ask(self, do: Callable[[], T]) -> T:
        """What `do` gives or raises. Raises Unanswered."""
        if self._late is not None and not self._late.done():
            raise Unanswered("it has not answered since")
        answer: Future[T] = Future()
        with self._lock:
            self._asked.put((do, answer))
            if not self._serving:
                self._serving = True
                threading.Thread(target=self._serve, name="spot-ask", daemon=True).start()
        try:
            return answer.result(self._answer_s)
        except FutureTimeout:
            self._late = answer
            raise Unanswered(f"no answer within {self._answer_s:g} s") from None

    def _serve(self) -> None:
        while True:
            try:
                do, answer = self._asked.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._asked.empty():
                        self._serving = False
                        return
                continue
            try:
                answer.set_result(do())
            except Exception as error:  # noqa: BLE001 - it is the caller's
                answer.set_exception(error)
            del do, answer  # not to be kept while waiting for the next one
