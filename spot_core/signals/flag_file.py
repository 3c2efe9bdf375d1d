"""A file whose appearance is the notice: for schedulers, shell scripts, and `spot watch`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.signals.base import BaseSource, LookFailed
from spot_core.signals.context import Context, Plugin
from spot_core.signals.notice import Notice, NoticeKind

logger = logging.getLogger(__name__)

PATH_ENV = "SPOT_FLAG_FILE"


def write_flag(path: Path, notice: Notice) -> None:
    """Put the notice at ``path``, whole or not at all. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(notice.to_json()) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class FlagFile(BaseSource):
    """A file with a notice in JSON (as `write_flag` writes it), or any other file: a preemption ``grace_s`` from now.

    A file that was there before this source was opened is left over from an earlier life, unless it holds a deadline
    still to come: honouring it would stop every life at its first step.
    """

    name = "file"

    def __init__(
        self, path: str | os.PathLike[str], *, grace_s: float = 30.0, clock: Clock = SYSTEM_CLOCK, every_s: float = 1.0
    ) -> None:
        super().__init__(clock=clock)
        self.path = Path(path)
        self.every_s = every_s
        self._grace_s = grace_s
        self._left_over: tuple[int, int] | None = None
        self._seen: tuple[int, int] | None = None
        self._torn: tuple[int, int] | None = None
        self._notice: Notice | None = None

    def describe(self) -> str:
        return f"{self.path}, every {self.every_s:g} s"

    def open(self) -> bool:
        self._left_over = self._identity()
        return True

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def look(self) -> Iterable[Notice]:
        identity = self._identity()
        if identity != self._seen:
            before, self._notice = self._notice, None if identity is None else self._read(identity)
            self._seen = identity
            if before is not None and (self._notice is None or self._notice.id != before.id):
                yield before.cancelled(f"{self.path} was removed or replaced")
        if self._notice is not None:
            yield self._notice

    def _read(self, identity: tuple[int, int]) -> Notice | None:
        text = self.path.read_text(encoding="utf-8", errors="replace")
        deadline = None
        notice = Notice(f"file:{self.path}", NoticeKind.PREEMPTION, self.name, None, str(self.path))
        if text.lstrip().startswith("{"):
            try:
                notice = Notice.from_json(json.loads(text))
            except ValueError as error:
                # Perhaps written without a rename and whole at the next look; if not, its presence counts.
                if identity != self._torn:
                    self._torn = identity
                    raise LookFailed(f"{self.path} holds no whole notice: {error}") from error
                logger.warning("%s holds no notice that can be read (%s); it counts as a bare flag", self.path, error)
            deadline = notice.deadline
        if identity == self._left_over and (deadline is None or deadline <= self._clock.now()):
            logger.warning(
                "%s was there before the start and is ignored; remove it, or touch it to stop this life", self.path
            )
            return None
        if deadline is None and notice.stops:
            deadline = self._clock.now() + self._grace_s
        return Notice(notice.id, notice.kind, notice.source, deadline, notice.detail)


def _make(context: Context) -> list[FlagFile]:
    path = context.argument or context.env.get(PATH_ENV, "")
    return [FlagFile(path, grace_s=context.grace_s, clock=context.clock)] if path else []


def _probe(context: Context) -> str | None:
    return context.env.get(PATH_ENV) or None


PLUGIN = Plugin("file", _make, _probe)
