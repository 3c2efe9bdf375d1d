"""The exit rules as a table."""

from __future__ import annotations

import pytest

from spot_core.launch.exit_code import Evidence, Verdict, shell_code, verdict

STOPPED, NOT_BEGUN, UNFINISHED, UNKNOWN = Evidence

# failures, evidence, configured code, told to stop -> code, job asks to be started again
TABLE = [
    ([], UNKNOWN, 143, False, 0, False),
    ([], STOPPED, 143, True, 0, False),
    ([143], STOPPED, 143, True, 143, True),
    ([143, 143], STOPPED, 143, False, 143, True),
    ([143, -15], STOPPED, 143, True, 143, True),
    ([-15, -15], STOPPED, 143, True, 143, True),
    ([143, -9], STOPPED, 143, True, 143, True),
    ([85, -15], STOPPED, 85, True, 85, True),
    (None, STOPPED, 85, True, 85, True),
    (None, STOPPED, 143, False, 143, True),
    # No record, no clean stop.
    ([143, 143], UNFINISHED, 143, True, 1, False),
    ([143, 143], UNKNOWN, 143, True, 1, False),
    ([-15, -15], UNFINISHED, 143, True, 1, False),
    (None, UNFINISHED, 143, True, 1, False),
    (None, UNKNOWN, 143, True, 1, False),
    # A real failure keeps its code, whatever the record says.
    ([143, 1], STOPPED, 143, True, 1, False),
    ([1, 143], STOPPED, 143, True, 1, False),
    ([77, -15], STOPPED, 143, False, 77, False),
    ([143, 77, 3], UNFINISHED, 143, False, 77, False),
    ([-11, -15], UNKNOWN, 143, False, 139, False),
    ([-9, -15], UNFINISHED, 143, True, 137, False),
    ([143, 143], STOPPED, 85, True, 143, False),
    # Told to stop before there was anything to save.
    ([-15, -15], NOT_BEGUN, 143, True, 143, True),
    (None, NOT_BEGUN, 143, True, 143, True),
    ([-15, -15], NOT_BEGUN, 143, False, 1, False),
    ([1, -15], NOT_BEGUN, 143, True, 1, False),
]


@pytest.mark.parametrize(("failures", "evidence", "exit_code", "told", "code", "stopped"), TABLE)
def test_verdict(
    failures: list[int] | None, evidence: Evidence, exit_code: int, told: bool, code: int, stopped: bool
) -> None:
    found = verdict(failures, evidence=evidence, exit_code=exit_code, asked_to_stop=told)
    assert (found.code, found.stopped) == (code, stopped)


def test_the_reason_names_codes_and_signals() -> None:
    found = verdict([-11, 3], evidence=UNKNOWN, exit_code=143)
    assert found == Verdict(139, "a worker failed (SIGSEGV, exit code 3)")


@pytest.mark.parametrize(("returncode", "status"), [(0, 0), (3, 3), (-15, 143), (-9, 137)])
def test_shell_code(returncode: int, status: int) -> None:
    assert shell_code(returncode) == status
