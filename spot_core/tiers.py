"""The local tier: copies of the newest generations on the machine's own disk, in front of the durable store.

A generation is committed here at once and drained to the durable store behind. The tier of a job is the union of the
folders of its machines: each rank writes its part to its own machine's disk, and rank 0 puts the marker on its own.
A local generation can be resumed from when its marker is found and every object it names lies, with its size, on one
of the machines. Nothing else is promised for it: a machine that is gone takes its parts along, and the durable store
decides. All keys are those of a run (`layout`), below a folder named by the run's id.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spot_core import layout
from spot_core.errors import ConfigError, FormatError, KeyExistsError, KeyMissingError, StoreError
from spot_core.generation import Committed
from spot_core.layout import GenerationId
from spot_core.manifest import JSON, Manifest, encode
from spot_core.prune import bury
from spot_core.record import RunRecord
from spot_core.restore import marked
from spot_core.store import LocalStore, Store, put_once

__all__ = ["Candidate", "LocalTier", "candidates"]

_log = logging.getLogger(__name__)

KEPT = 2
"""Committed generations kept locally, the newest first; fewer where the disk is short. A newer one is worth more than
an older one to fall back on: the durable store keeps those."""


@dataclass(frozen=True)
class Candidate:
    """A local generation of which every object lies on some machine. `owners`: by key, the ranks that have it."""

    committed: Committed
    owners: Mapping[str, tuple[int, ...]]


class LocalTier:
    """This machine's folder of the local tier of one run."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.store = store
        self.run_id = run_id

    @classmethod
    def open(cls, folder: str, run_id: str, durable: Store) -> LocalTier:
        """No effect. Raises ConfigError for a folder inside of the run itself."""
        store = LocalStore(Path(folder).expanduser() / run_id)
        if isinstance(durable, LocalStore) and store.root.is_relative_to(durable.root):
            raise ConfigError(f"local={folder!r} lies inside the run {durable.uri}.", hint="Give another folder.")
        return cls(store, run_id)

    def enter(self, record: RunRecord, life: int, info: Mapping[str, JSON]) -> None:
        """Mark the folder as one of this run, and `life` as begun here: an older life of this machine is fenced.

        `info` must be the same on all ranks: those of one machine put the same bytes. Raises StoreError.
        """
        put_once(self.store, layout.RUN_RECORD, record.to_bytes())
        claim: dict[str, JSON] = {"format": record.format, "life": life, "info": info}
        try:
            put_once(self.store, layout.life_key(life), encode(claim))
        except KeyExistsError:
            _log.warning("Life %d is known at %s in other words already.", life, self.store.uri)

    def holdings(self) -> dict[str, Any]:
        """What lies here, as JSON that other ranks can read: by generation its marker and its objects' sizes.

        A folder that cannot be read holds nothing; the log says so.
        """
        held: dict[str, Any] = {}
        try:
            for name in self.store.list_dirs(layout.GENERATIONS):
                gen = GenerationId.parse(name)
                if gen is not None and self.store.stat(layout.tombstone_key(gen)) is None:
                    held[name] = self._holding(gen)
        except StoreError as error:
            _log.warning("spot: the local tier %s cannot be read and is left aside: %s", self.store.uri, error)
            return {}
        return held

    def _holding(self, gen: GenerationId) -> dict[str, Any]:
        marker = layout.marker_key(gen)
        sizes = {info.key: info.size for info in self.store.list(layout.generation_prefix(gen)) if info.key != marker}
        try:
            manifest = Manifest.from_bytes(self.store.get(marker), marker)
        except KeyMissingError:
            return {"marker": None, "objects": sizes}
        except FormatError as error:
            _log.warning("spot: a local generation is left aside: %s", error)
            return {"marker": None, "objects": sizes}
        return {"marker": manifest.to_json(), "objects": sizes}

    def make_room(self, spare: Collection[str], extra: Collection[str], nbytes: int) -> list[str]:
        """Before `nbytes` are written: bury the generations that are neither in `spare` nor in `extra`, and those in
        `extra` too, oldest first, until the bytes fit. Names of what went. Raises StoreError.

        `spare` must name the newest committed one, those being drained and the one about to be written.
        """
        names = [name for name in self.store.list_dirs(layout.GENERATIONS) if GenerationId.parse(name) is not None]
        buried = [name for name in names if name not in spare and name not in extra]
        for name in buried:
            self._bury(name)
        for name in sorted(set(extra) & set(names) - set(spare)):
            if self._fits(nbytes):
                break
            self._bury(name)
            buried.append(name)
        return buried

    def _bury(self, name: str) -> None:
        gen = GenerationId.parse(name)
        assert gen is not None
        bury(self.store, gen)

    def _fits(self, nbytes: int) -> bool:
        if not isinstance(self.store, LocalStore):
            return True
        place = next(path for path in (self.store.root, *self.store.root.parents) if path.exists())
        return shutil.disk_usage(place).free >= nbytes


def candidates(holdings: Sequence[Mapping[str, Any]], run_id: str) -> list[Candidate]:
    """What the machines hold together, newest first. `holdings`: by rank, what `LocalTier.holdings` gave."""
    return sorted(_candidates(holdings, run_id), key=lambda found: found.committed.id, reverse=True)


def _candidates(holdings: Sequence[Mapping[str, Any]], run_id: str) -> Iterator[Candidate]:
    for name in sorted({name for held in holdings for name in held}):
        markers = [held[name]["marker"] for held in holdings if name in held and held[name]["marker"] is not None]
        committed = None if not markers else marked(name, Manifest.from_json(markers[0]), run_id)
        if committed is None:
            continue
        owners = {
            ref.key: tuple(
                rank
                for rank, held in enumerate(holdings)
                if name in held and held[name]["objects"].get(ref.key) == ref.size
            )
            for ref in committed.manifest.objects
        }
        missing = sorted(key for key, ranks in owners.items() if not ranks)
        if missing:
            _log.warning(
                "spot: local generation %s is passed over: %d of its %d objects are on none of the machines (%s)",
                name,
                len(missing),
                len(owners),
                missing[0],
            )
            continue
        yield Candidate(committed, owners)
