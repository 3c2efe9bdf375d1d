"""`spot doctor`: can a run live at this place, and how does the one that is there?"""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated

import typer

from spot_core import fence, layout, memory
from spot_core.cli import exits
from spot_core.cli.opening import open_run
from spot_core.cli.output import JsonOption, RunArgument, age, console, print_json, size, table
from spot_core.config import Settings
from spot_core.errors import KeyMissingError, RestoreError, SpotError
from spot_core.preflight import (
    Level,
    examine_memory,
    examine_pace,
    examine_space,
    examine_store,
    folder_of,
)
from spot_core.run import Run
from spot_core.verify import Depth

PACKAGES = ("lightning-spot", "torch", "lightning", "pytorch-lightning", "accelerate", "fsspec", "obstore", "gcsfs")


@dataclass(frozen=True)
class Finding:
    check: str
    ok: bool
    detail: str
    code: int = exits.OK  # what the command exits with when this is the worst finding


def doctor(
    run: RunArgument,
    write: Annotated[
        bool, typer.Option("--write/--no-write", help="Also try what a run does at its start, with objects of its own.")
    ] = True,
    state_gb: Annotated[
        float | None,
        typer.Option(help="Size of one machine's share of a checkpoint: does it fit, how long will it take?"),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Look at a run and its store: lives, the newest generation; then the preflight that a run does at its start.

    Exit codes: 0 all well, also for a place that is still empty; 4 the newest generation is damaged, 5 the store
    failed or does not permit what a run needs.
    """
    opened = open_run(run)
    findings = list(_examine(opened, write, None if state_gb is None else int(state_gb * 1e9)))
    if json:
        print_json(
            {
                "run": opened.uri,
                "ok": all(item.ok for item in findings),
                "findings": [{"check": item.check, "ok": item.ok, "detail": item.detail} for item in findings],
            }
        )
    else:
        rows = table("check", "", "finding")
        for item in findings:
            rows.add_row(item.check, "ok" if item.ok else "FAULT", item.detail)
        console().print(rows, markup=False)
    raise typer.Exit(max((item.code for item in findings if not item.ok), default=exits.OK))


def _examine(run: Run, write: bool, state_bytes: int | None) -> Iterator[Finding]:
    for name, check in (
        ("run record", _record),
        ("generations", _generations),
        ("newest generation", _newest),
        ("lives", _lives),
    ):
        yield _guarded(name, lambda check=check: check(run))  # type: ignore[misc]
    if write:
        yield from _preflight(run, state_bytes)
    yield Finding("versions", True, _versions())


def _guarded(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, check())
    except SpotError as error:
        return Finding(name, False, str(error), exits.code_for(error))


def _record(run: Run) -> str:
    record = run.record()
    return "none: a run can begin here" if record is None else f"run {record.run_id}"


def _generations(run: Run) -> str:
    found = run.discover()
    told = f"{len(found.generations)} committed"
    counts: dict[str, int] = {}
    for problem in found.problems:
        counts[problem.kind.value] = counts.get(problem.kind.value, 0) + 1
    return ", ".join([told, *(f"{number} {kind}" for kind, number in sorted(counts.items()))])


def _newest(run: Run) -> str:
    found = run.discover()
    if not found.generations:
        return "none"
    newest = found.generations[0]
    run.verify(newest, Depth.SIZES)
    old = age(run.clock.now() - newest.manifest.created)
    return f"{newest.id}, {old} old, {size(newest.manifest.size)}, every object there with its size"


def _lives(run: Run) -> str:
    newest = fence.newest_life(run.store)
    if newest == 0:
        return "none yet"
    try:
        stop = json_text.loads(run.store.get(layout.stop_key(newest)))
    except KeyMissingError:
        return f"{newest}; the newest runs, or ended without a stop record"
    except ValueError as error:
        raise RestoreError(f"The stop record of life {newest} cannot be read: {error}.") from error
    return f"{newest}; the newest stopped at step {stop.get('step')} ({stop.get('reason')})"


def _preflight(run: Run, state_bytes: int | None) -> Iterator[Finding]:
    try:
        checks, rate = examine_store(run)
    except SpotError as error:  # not a place to try anything at
        yield Finding("look", False, str(error), exits.code_for(error))
        return
    folder = folder_of(run.store)
    if folder is not None:
        checks.append(examine_space("space", folder, state_bytes or 0, Settings.keep))
    if state_bytes is not None:
        checks.append(examine_memory(state_bytes, memory.available_bytes(), memory.total_bytes()))
        if rate is not None:
            checks.append(examine_pace(state_bytes, rate, window_s=Settings.window_s, interval_s=None))
    for check in checks:
        failed = check.level is Level.FAIL
        code = exits.STORE if check.error is None else exits.code_for(check.error)
        told = f"warning: {check.detail}" if check.level is Level.WARN else check.detail
        yield Finding(check.name, not failed, told, code if failed else exits.OK)


def _versions() -> str:
    found = [f"python {sys.version.split()[0]}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)
