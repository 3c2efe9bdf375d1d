"""Naming a generation on the command line, and telling about what was found."""

from __future__ import annotations

import re
from typing import Any

from spot_core import layout
from spot_core.cli.output import size
from spot_core.errors import NoGenerationError, TornGenerationError
from spot_core.generation import Committed
from spot_core.layout import GenerationId
from spot_core.restore import Discovery, Problem
from spot_core.run import Run

_SHORT = re.compile(r"(?:(\d+)-)?(\d+)")


def pick(run: Run, discovery: Discovery, text: str | None) -> Committed:
    """The generation that `text` names: a full name, LIFE-STEP, STEP (the newest life's), or None for the newest.

    Raises:
        NoGenerationError: there is none of that name.
        TornGenerationError: there is something of that name, but it is no good generation.
    """
    wanted = None if text is None else _SHORT.fullmatch(text)
    if text is not None and wanted is None:
        raise NoGenerationError(f"{text!r} is no generation's name.", hint="List them with `spot ls`.")
    life = int(wanted[1]) if wanted and wanted[1] else None
    step = int(wanted[2]) if wanted else None

    def matches(gen: GenerationId | None) -> bool:
        return gen is not None and (life is None or gen.life == life) and (step is None or gen.step == step)

    for committed in discovery.generations:
        if matches(committed.id):
            return committed
    for problem in discovery.problems:
        if matches(problem.generation):
            raise TornGenerationError(problem.message, hint="Look at all generations with `spot verify`.")
    what = "no generation" if text is None else f"no generation {text}"
    raise NoGenerationError(f"There is {what} at {run.uri}.", hint="List them with `spot ls`.")


def summary(committed: Committed) -> dict[str, Any]:
    manifest = committed.manifest
    return {
        "name": committed.id.name,
        "life": manifest.life,
        "step": manifest.step,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "bytes": manifest.size,
        "own_bytes": manifest.own_size,
        "refers_to": refers_to(committed),
        "reason": manifest.meta.get("reason"),
        "finished": manifest.finished,
    }


def refers_to(committed: Committed) -> list[str]:
    """Names of the older generations that hold something of this one."""
    found = (layout.generation_of(ref.key) for ref in committed.manifest.referred)
    return sorted({gen.name for gen in found if gen is not None})


def referred(committed: Committed) -> str:
    """The same in words, with the bytes; empty when there are none."""
    manifest = committed.manifest
    if not manifest.referred:
        return ""
    return f"{size(manifest.size - manifest.own_size)} of {', '.join(refers_to(committed))}"


def problem_json(problem: Problem) -> dict[str, Any]:
    return {
        "kind": problem.kind.value,
        "where": problem.where,
        "message": problem.message,
        "generation": None if problem.generation is None else problem.generation.name,
    }


def nothing_there(run: Run) -> str:
    if run.record() is None:
        return f"No run at {run.uri}."
    return f"The run at {run.uri} has no committed generation."
