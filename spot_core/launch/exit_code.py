"""Which exit code a launcher leaves with: pure functions of how the workers ended and what the run's record says.

An orchestrator decides by this one number whether the job comes back. torchrun turns everything into 1, so a clean
stop looks like a crash; a bare 143 would hide that nothing was saved. The rule: the code that brings the job back is
given only when the run's record says that the state is safe, and a real failure always keeps its own code.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass

# The answer when the workers' own codes cannot be trusted or are not known.
FAILED = 1


class Evidence(enum.Enum):
    """What is known, apart from the workers' codes, about how this start of the job ended."""

    STOPPED = "the stop record says that the run stopped cleanly"
    NOT_BEGUN = "no life of the run was claimed since the start, so there is nothing to save"
    UNFINISHED = "a life of the run began and left no stop record"
    UNKNOWN = "no stop record was looked for or could be read (give --run)"


@dataclass(frozen=True)
class Verdict:
    """The launcher's exit code and the reason for it, in words for the log."""

    code: int
    why: str
    stopped: bool = False  # the job asks to be started again


def shell_code(returncode: int) -> int:
    """Exit status (0..255) of a process that ended with `returncode`; -n (killed by signal n) becomes 128 + n."""
    return 128 - returncode if returncode < 0 else returncode


def verdict(
    failures: Sequence[int] | None,
    *,
    evidence: Evidence,
    exit_code: int,
    asked_to_stop: bool = False,
) -> Verdict:
    """The launcher's exit code.

    failures: return codes of the workers that did not end with 0, first failure first (-n: killed by signal n); empty
        when all ended with 0; None when the agent went before it could learn them (a signal while it waited for other
        nodes, a lost rendezvous).
    exit_code: the code of a clean stop (from the stop record if there is one, else as configured).
    asked_to_stop: the launcher itself was told to stop by a signal.
    """
    if failures is not None and not failures:
        return Verdict(0, "every worker ended with 0")

    # A peer is ended by the agent with SIGTERM when the first rank leaves; after a record that says "stopped" its
    # SIGKILL is no more than a slow teardown: the state is committed and every rank had reached the last barrier.
    benign = {exit_code, -signal.SIGTERM} | ({-signal.SIGKILL} if evidence is Evidence.STOPPED else set())
    real = [code for code in failures or () if code not in benign]
    if real:
        return Verdict(shell_code(real[0]), f"a worker failed ({', '.join(map(describe, failures or ()))})")
    if evidence is Evidence.STOPPED:
        return Verdict(exit_code, evidence.value, stopped=True)
    if evidence is Evidence.NOT_BEGUN and asked_to_stop:
        return Verdict(exit_code, evidence.value, stopped=True)
    ended = "the agent ended early" if failures is None else ", ".join(map(describe, failures))
    return Verdict(FAILED, f"workers ended without a clean stop ({ended}): {evidence.value}")


def describe(returncode: int) -> str:
    """`returncode` in words: "exit code 3" or "SIGKILL"."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
