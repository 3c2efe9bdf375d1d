"""Exit codes of `spot`, and the one place that turns an error into what a person reads.

==  ==================================================================
 0  done
 1  a fault of the program itself (a traceback is shown)
 2  the call is wrong: usage, configuration
 3  nothing there: no run, no such generation
 4  damaged: a generation is torn, corrupt or of an unknown format
 5  the store: not reachable, not permitted, an I/O error
 6  refused: a newer life owns the run, or the commit could not be made
==  ==================================================================
"""

from __future__ import annotations

import sys
from typing import Any

from typer import Exit
from typer.core import TyperGroup

from spot_core.errors import (
    CommitError,
    ConfigError,
    NoGenerationError,
    Reason,
    RestoreError,
    ResumeMismatchError,
    SpotError,
    StoreError,
)

OK = 0
USAGE = 2
NOTHING = 3
DAMAGED = 4
STORE = 5
REFUSED = 6

_BY_ERROR: tuple[tuple[type[SpotError], int], ...] = (
    (ConfigError, USAGE),
    (NoGenerationError, NOTHING),
    (RestoreError, DAMAGED),
    (StoreError, STORE),
    (CommitError, REFUSED),
    (ResumeMismatchError, DAMAGED),
)


def code_for(error: SpotError) -> int:
    if error.reason is Reason.NOT_A_RUN:
        return NOTHING
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), 1)


class ReportingGroup(TyperGroup):
    """Prints a `SpotError` as its message and what to do, and exits with the code of its kind. No traceback."""

    def invoke(self, ctx: Any) -> Any:  # Any: typer ships its own click
        try:
            return super().invoke(ctx)
        except SpotError as error:
            sys.stderr.write(f"error: {error.message or type(error).__name__}\n")
            if error.hint:
                sys.stderr.write(f"   do: {error.hint}\n")
            raise Exit(code_for(error)) from None
