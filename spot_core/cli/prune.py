"""`spot prune`: let generations go, by hand. Claims no life, so a job that is running goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from spot_core import fence
from spot_core.cli.opening import open_run
from spot_core.cli.output import JsonOption, RunArgument, console, print_json
from spot_core.cli.verify import DepthOption, look
from spot_core.errors import ConfigError, NoGenerationError, StoreError
from spot_core.layout import GenerationId
from spot_core.preflight import STALE_S, sweep
from spot_core.prune import prune as prune_store
from spot_core.restore import Discovery
from spot_core.retention import Retention
from spot_core.run import Run
from spot_core.store import BlobSource, Capabilities, ObjectInfo, Store, Unfinished
from spot_core.verify import Depth

EVERYTHING = 1 << 62


class DryRun:
    """A store whose writes do nothing: what is told about a dry run comes from the code that does it in earnest."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def uri(self) -> str:
        return self._store.uri

    @property
    def storage_options(self) -> Mapping[str, Any]:
        return self._store.storage_options

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, Sequence[memoryview]]], *, threads: int = 4) -> None:
        self._store.get_ranges(key, ranges, threads=threads)

    def stat(self, key: str) -> ObjectInfo | None:
        return self._store.stat(key)

    def list_dirs(self, prefix: str) -> Sequence[str]:
        return self._store.list_dirs(prefix)

    def put_if_absent(self, key: str, data: bytes) -> None:
        pass

    def put(self, key: str, data: bytes) -> None:
        pass

    def put_blob(self, key: str, source: BlobSource) -> None:
        pass

    def delete(self, key: str) -> None:
        pass

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        return self._store.unfinished(prefix)

    def abort(self, upload: Unfinished) -> None:
        pass

    def list(self, prefix: str, *, recursive: bool = True) -> Sequence[ObjectInfo]:
        return self._store.list(prefix, recursive=recursive)


def prune(
    run: RunArgument,
    keep: Annotated[int | None, typer.Option(help="Keep this many of the newest good generations, from 1.")] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Also keep the first generation at or after every so many steps.")
    ] = None,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Without --keep: only clear leftovers of interrupted saves and prunes.")
    ] = False,
    depth: DepthOption = Depth.SIZES,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would go.")] = False,
    json: JsonOption = False,
) -> None:
    """Drop old generations and leftovers of interrupted saves. Damaged generations do not count as kept.

    Exit codes: 0 done, 2 neither --keep nor --orphans, 3 no generation there, 5 the store failed.
    """
    if keep is None and (not orphans or keep_every is not None):
        raise ConfigError("Say what may go.", hint="Give --keep N, or --orphans for interrupted saves only.")
    retention = Retention(EVERYTHING if keep is None else keep, keep_every)
    opened = open_run(run)
    found = opened.discover()
    if not found.generations and keep is not None:
        raise NoGenerationError(f"There is no generation at {opened.uri}: nothing is pruned.")
    damaged = _damaged(opened, found, depth) if keep is not None else []
    store = DryRun(opened.store) if dry_run else opened.store
    sweep(store, opened.clock.now() - STALE_S)
    life = fence.newest_life(opened.store)
    own = [item.id for item in found.generations if item.id.life == life]
    done = prune_store(
        store,
        found,
        retention,
        life=life,
        damaged=damaged,
        held=max(own, default=fence.builds_on(opened.store, life) if life else None),
        check=lambda: _check_no_new_life(opened, life),
        uploads=True,
    )
    if json:
        print_json(
            {
                "run": opened.uri,
                "dry_run": dry_run,
                "dropped": [gen.name for gen in done.dropped],
                "leftovers": [gen.name for gen in done.leftovers],
                "objects": done.objects,
                "uploads": done.uploads,
            }
        )
        return
    out = console()
    for what, generations in (("generation", done.dropped), ("leftover", done.leftovers)):
        for gen in generations:
            out.print(f"{'would drop' if dry_run else 'dropped'} {what} {gen.name}", markup=False)
    told = f"{'Would delete' if dry_run else 'Deleted'} {done.objects} objects at {opened.uri}."
    if done.uploads is None:
        told += " Whether unfinished uploads remain could not be told; the log says why."
    elif done.uploads:
        told += f" {'Would abort' if dry_run else 'Aborted'} {done.uploads} unfinished uploads."
    out.print(told, markup=False)


def _check_no_new_life(run: Run, life: int) -> None:
    """Raises FencedError: what a life that began just now builds on is not known here."""
    fence.check_fence(run.store, life)


def _damaged(run: Run, found: Discovery, depth: Depth) -> list[GenerationId]:
    """Raises StoreError when a generation cannot be read: what cannot be judged is not pruned."""
    damaged = []
    for verdict in (look(run, item, depth) for item in found.generations):
        if verdict is not None and isinstance(verdict.error, StoreError):
            raise verdict.error
        if verdict is not None and verdict.error is not None:
            damaged.append(verdict.committed.id)
    return damaged


def register(app: typer.Typer) -> None:
    app.command("prune")(prune)
