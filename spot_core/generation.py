"""The write side, as types: Open -> (Part per rank) -> Written -> Committed.

Each state can be reached only from the one before, so that no caller can put the marker before the data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spot_core import layout
from spot_core.errors import CommitError, FencedError, KeyExistsError, Reason, SaveError, StoreError
from spot_core.layout import GenerationId, PartTarget
from spot_core.manifest import FORMAT, JSON, Manifest, Part, encode
from spot_core.parts import write_part
from spot_core.store import Store, put_once

if TYPE_CHECKING:
    from spot_core.run import Writer

__all__ = ["Committed", "Open", "Written"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Committed:
    """A generation whose marker exists. Made by `Written.commit`, and by discovery, which reads the marker."""

    id: GenerationId
    manifest: Manifest


@dataclass(frozen=True)
class Open:
    """A generation being written: nothing of it counts yet."""

    id: GenerationId
    write_id: str
    """Tells this attempt apart; with `id` it lets every rank compute its target (`layout.part_target`)."""
    writer: Writer = field(repr=False, compare=False)

    def target(self, rank: int) -> PartTarget:
        return layout.part_target(self.id, self.write_id, rank)

    def write(
        self, rank: int, objects: Mapping[str, bytes], *, unchanging: Mapping[str, bytes] | None = None
    ) -> Part:
        """Write named bytes as `rank`'s part, for callers that hold them in memory (a JAX loop, a test).

        `unchanging`: further named bytes that are not expected to change from save to save (a frozen base). They are
        not written again while they are, all of them, what the generation before holds.

        Raises:
            SaveError: the store failed; nothing of this generation counts.
        """
        try:
            return write_part(
                self.writer.run.store,
                self.target(rank),
                rank,
                objects,
                unchanging=unchanging,
                lendable=self.writer.lendable.values(),
            )
        except StoreError as error:
            raise SaveError(
                f"Rank {rank} could not write its part of generation {self.id} at {self.writer.run.uri}: {error} "
                "Earlier generations are whole."
            ) from error

    def seal(self, parts: Sequence[Part], *, world_size: int) -> Written:
        """All ranks' parts are durable.

        Raises SaveError when one is missing, given twice or of another attempt, or refers to what the generation that
        this life committed last (or went on from) does not hold.
        """
        by_rank = {part.rank: part for part in parts}
        missing = sorted(set(range(world_size)) - by_rank.keys())
        if missing:
            raise SaveError(
                f"Generation {self.id} at {self.writer.run.uri} lacks the parts of ranks {missing} of {world_size}. "
                "Earlier generations are whole.",
                reason=Reason.MISSING_RANKS,
            )
        if len(by_rank) != len(parts) or len(by_rank) != world_size:
            ranks = sorted(part.rank for part in parts)
            raise SaveError(f"Generation {self.id}: parts of ranks {ranks} do not make a world of {world_size}.")
        for part in parts:
            target = self.target(part.rank)
            if part.index.key != target.index_key or (part.blob and part.blob.key != target.blob_key):
                raise SaveError(
                    f"Generation {self.id}, attempt {self.write_id}: the part of rank {part.rank} was written "
                    f"elsewhere ({part.index.key})."
                )
            for ref in part.bases:
                if ref.key != target.base_key and self.writer.lendable.get(ref.key) != ref:
                    raise SaveError(
                        f"Generation {self.id}: the part of rank {part.rank} refers to {ref.key}, which the generation "
                        "before it does not hold in this form. Earlier generations are whole."
                    )
        return Written(self, tuple(by_rank[rank] for rank in range(world_size)))


@dataclass(frozen=True)
class Written:
    """Every part is durable; one marker is missing."""

    open: Open
    parts: tuple[Part, ...]

    def commit(self, meta: Mapping[str, JSON], durable: Callable[[Committed], None] | None = None) -> Committed:
        """Put the marker, then move the pointer. `durable` is called in between: the pointer is a hint.

        Raises:
            FencedError: a newer life has begun, or has pruned this name: stop writing.
            CommitError: the marker could not be put; reason UNKNOWN_OUTCOME when it may still appear (then this
                generation is real, which harms nothing).
        """
        writer, gen = self.open.writer, self.open.id
        store = writer.run.store
        manifest = Manifest(
            run_id=writer.run_id,
            life=gen.life,
            step=gen.step,
            write_id=self.open.write_id,
            created=writer.run.clock.now(),
            world_size=len(self.parts),
            parts=self.parts,
            meta=meta,
        )
        try:
            data = manifest.to_bytes()
        except (TypeError, ValueError) as error:
            raise CommitError(f"Generation {gen}: its meta is not JSON ({error}).") from error
        with writer.committing(manifest):
            self._put_marker(store, gen, data, writer.check_fence)
            self._check_not_pruned(store, gen)
        committed = Committed(gen, manifest)
        if durable is not None:
            durable(committed)
        _move_pointer(store, gen)
        return committed

    def _put_marker(self, store: Store, gen: GenerationId, data: bytes, check_fence: Callable[[], None]) -> None:
        safe = "Earlier generations are whole."
        try:
            check_fence()
        except StoreError as error:
            raise CommitError(f"Generation {gen} is not committed: no fence check possible. {error} {safe}") from error
        try:
            put_once(store, layout.marker_key(gen), data)
        except KeyExistsError as error:
            raise CommitError(
                f"Generation {gen} at {store.uri} already has a marker, put by another writer. {safe}",
                hint="Two processes write as one life, on a store without put-if-absent.",
            ) from error
        except StoreError as error:
            raise CommitError(
                f"Generation {gen} at {store.uri}: whether its marker is there is unknown. {error} {safe}",
                reason=Reason.UNKNOWN_OUTCOME,
            ) from error

    def _check_not_pruned(self, store: Store, gen: GenerationId) -> None:
        """A writer that stalled long enough may have put its marker on a name that a newer life has buried."""
        try:
            buried = store.stat(layout.tombstone_key(gen))
        except StoreError as error:
            # The marker is there. Were the name buried, a newer life would exist and the next commit would say so.
            _log.warning("Could not look whether generation %s was pruned meanwhile: %s", gen, error)
            return
        if buried is not None:
            raise FencedError(
                f"Generation {gen} at {store.uri} was pruned before its marker came: it does not count.",
                reason=Reason.PRUNED,
            )


def _move_pointer(store: Store, gen: GenerationId) -> None:
    try:
        store.put(layout.POINTER, encode({"format": FORMAT, "generation": gen.name}))
    except StoreError as error:
        # The pointer is a hint; the generation is committed.
        _log.warning("Generation %s is committed; the pointer could not be moved: %s", gen, error)
