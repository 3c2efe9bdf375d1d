"""`spot doctor`: can a run live at this place, and how does the one that is there?"""

from __future__ import annotations

import json as json_text
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated

import typer

from spot_core import fence, layout
from spot_core.cli import exits
from spot_core.cli.output import JsonOption, RunArgument, age, console, print_json, size, table
from spot_core.errors import KeyMissingError, RestoreError, SpotError
from spot_core.run import Run
from spot_core.store import LocalStore
from spot_core.verify import Depth

PACKAGES = ("lightning-spot", "torch", "lightning", "pytorch-lightning", "accelerate", "fsspec", "s3fs", "gcsfs")


@dataclass(frozen=True)
class Finding:
    check: str
    ok: bool
    detail: str
    code: int = exits.OK  # what the command exits with when this is the worst finding


def doctor(
    run: RunArgument,
    write: Annotated[
        bool, typer.Option("--write/--no-write", help="Also write, read and delete a small object of its own.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """Look at a run and its store: access, abilities, lives, the newest generation.

    Exit codes: 0 all well, also for a place that is still empty; 4 the newest generation is damaged, 5 the store
    failed or does not permit what a run needs.
    """
    opened = Run.open(run)
    findings = list(_examine(opened, write))
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


def _examine(run: Run, write: bool) -> Iterator[Finding]:
    for name, check in (
        ("run record", _record),
        ("generations", _generations),
        ("newest generation", _newest),
        ("lives", _lives),
    ):
        yield _guarded(name, lambda check=check: check(run))  # type: ignore[misc]
    if write:
        yield _guarded("access", lambda: _access(run))
    if isinstance(run.store, LocalStore):
        yield _guarded("space", lambda: _space(run.store))  # type: ignore[arg-type]
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


def _access(run: Run) -> str:
    # A name that discovery and the claim of a run pass over, should the delete be what fails.
    key = f".tmp-{secrets.token_hex(8)}"
    data = secrets.token_bytes(16)
    run.store.put(key, data)
    listed = any(info.key == key for info in run.store.list("", recursive=False))
    if run.store.get(key) != data:
        raise RestoreError(f"{key} at {run.uri} does not read back as it was written.")
    run.store.delete(key)
    conditional = run.store.capabilities.put_if_absent
    return "write, read, {}delete; {}".format(
        "list, " if listed else "",
        "conditional put" if conditional else "no conditional put: two jobs on one run are told apart by chance only",
    )


def _space(store: LocalStore) -> str:
    folder = next(path for path in (store.root, *store.root.parents) if path.exists())
    usage = shutil.disk_usage(folder)
    return f"{size(usage.free)} of {size(usage.total)} free"


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
