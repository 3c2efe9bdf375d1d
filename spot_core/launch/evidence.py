"""What the launcher knows about its workers' end apart from exit codes: note, stop record, claimed lives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from spot_core.errors import FormatError, StoreError
from spot_core.fence import newest_life
from spot_core.launch.exit_code import Evidence
from spot_core.launch.stoprecord import StopRecord, read_note, read_stop

if TYPE_CHECKING:
    from spot_core.store import Store

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# A launcher that is told to leave cannot wait for a store that does not answer.
STORE_TIMEOUT_S = 20.0


class Witness:
    """Looks at a run before its workers start and after they ended.

    store: the run's store, None when the launcher was not told where the run is (then only the note speaks).
    note: local file that the workers may leave (`stoprecord.leave_note`).
    """

    def __init__(self, store: Store | None, note: Path, *, timeout_s: float = STORE_TIMEOUT_S) -> None:
        self._store = store
        self._note = note
        self._timeout_s = timeout_s
        self._life_before: int | None = None

    def before(self) -> None:
        """Call before any worker starts: a record of an older life must not be taken for this one's."""
        if (store := self._store) is not None:
            self._life_before = self._ask(store, lambda: newest_life(store), "before the start")

    def after(self) -> tuple[Evidence, StopRecord | None]:
        """What is known now that the workers ended, and the stop record if there is one. Never raises."""
        try:
            note = read_note(self._note)
        except (OSError, FormatError) as error:
            _log.warning("The workers' stop note cannot be read: %s", error)
            note = None
        if note is not None:
            return Evidence.STOPPED, note
        store, before = self._store, self._life_before
        if store is None or before is None:
            return Evidence.UNKNOWN, None
        life = self._ask(store, lambda: newest_life(store), "after the workers ended")
        if life is None:
            return Evidence.UNKNOWN, None
        if life == before:
            return Evidence.NOT_BEGUN, None
        record = self._ask(store, lambda: read_stop(store, life), "after the workers ended")
        return (Evidence.UNFINISHED if record is None else Evidence.STOPPED), record

    def _ask(self, store: Store, question: Callable[[], _T], when: str) -> _T | None:
        try:
            return _bounded(question, self._timeout_s)
        except (StoreError, FormatError, TimeoutError) as error:
            _log.warning(
                "The stop record of %s cannot be looked up %s (%s: %s); a clean stop may be reported as a failure.",
                store.uri,
                when,
                type(error).__name__,
                error,
            )
            return None


def _bounded(question: Callable[[], _T], timeout_s: float) -> _T:
    """The answer, or TimeoutError; the thread left behind is a daemon and ends with the process."""
    answer: Future[_T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:  # noqa: BLE001 - handed to the caller, who knows which ones to expect
            answer.set_exception(error)

    threading.Thread(target=ask, name="spot-launch-record", daemon=True).start()
    try:
        return answer.result(timeout_s)
    except FutureTimeout as error:  # another class than TimeoutError before Python 3.11
        raise TimeoutError(f"no answer in {timeout_s:g} s") from error
