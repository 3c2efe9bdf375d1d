"""A run, seen from outside (`Run`: no effect) and from inside (`Writer`: a claimed life)."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from spot_core import fence, layout
from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.errors import CommitError, ConfigError, Reason
from spot_core.generation import Committed, Open
from spot_core.layout import GenerationId
from spot_core.manifest import JSON, Manifest, ObjectRef
from spot_core.prune import Pruned, prune
from spot_core.record import RunRecord, create_record, read_record
from spot_core.restore import Discovery, Selection, discover, select
from spot_core.retention import Retention
from spot_core.store import Store, open_store
from spot_core.verify import Depth, Verified, verify

__all__ = ["Run", "Writer"]

_log = logging.getLogger(__name__)


class Run:
    """The durable thing at a URI. Opening and looking have no effect; only `claim` writes."""

    def __init__(self, store: Store, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.store = store
        self.clock = clock

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str] | Store,
        *,
        clock: Clock = SYSTEM_CLOCK,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Run:
        """Raises ConfigError for what is no run location."""
        if isinstance(uri, (str, os.PathLike)):
            return cls(open_store(uri, storage_options=storage_options), clock=clock)
        # Not isinstance with a protocol: that evaluates every property, and `capabilities` may write.
        if not callable(getattr(uri, "put_if_absent", None)):
            raise ConfigError(f"A run is opened by a path, a URI or a Store, not by {type(uri).__name__}.")
        if storage_options:
            raise ConfigError("storage_options belong to a URI; this Store has its own.")
        return cls(uri, clock=clock)

    @property
    def uri(self) -> str:
        return self.store.uri

    def record(self) -> RunRecord | None:
        """The run record, None where no run was started yet.

        Raises ConfigError where the place belongs to something else, FormatError for a newer release's run,
        StoreError.
        """
        return read_record(self.store)

    def discover(self) -> Discovery:
        """All committed generations, newest first, and whatever else was found.

        Raises StoreError when that cannot be told: never an empty answer for an error.
        """
        record = self.record()
        return discover(self.store, None if record is None else record.run_id)

    def verify(self, committed: Committed, depth: Depth = Depth.SIZES) -> Verified:
        """Raises TornGenerationError, CorruptShardError or FormatError for damage, StoreError."""
        return verify(self.store, committed, depth)

    def select(
        self, depth: Depth = Depth.SIZES, *, discovery: Discovery | None = None, skip: Collection[GenerationId] = ()
    ) -> Selection:
        """The newest good generation; `Selection.verified` is None when nothing was ever committed.

        `skip` passes over generations that failed later, while loading.
        Raises TornGenerationError (reason ALL_DAMAGED) when there are generations but none is good, StoreError.
        """
        return select(self.store, discovery or self.discover(), depth, skip)

    def claim(self, *, info: Mapping[str, JSON] | None = None, continues: Committed | None = None) -> Writer:
        """Claim the next life: the only effect. Call after a successful load, on rank 0.

        `continues`: the generation of this run that was loaded, its digests checked; later ones may refer to what it
        holds (`Writer.lendable`).

        Raises ConfigError where the place is no run and not empty, StoreError.
        """
        record = self.record()
        run_id = self._adopted_run_id() if record is None else None
        # Asked before anything is put: the store may have to be told apart by a probe.
        conditional = self.store.capabilities.put_if_absent
        if record is None:
            record = create_record(self.store, self.clock, run_id)
        loaded = None if continues is None else continues.id
        claim = fence.claim_life(self.store, self.clock, info or {}, continues=loaded)
        if not conditional:
            _log.warning(
                "%s has no put-if-absent: of two processes that start at the same moment one is told only at its next "
                "save, and what it computed until then is lost. See to it that only one job runs there.",
                self.uri,
            )
        writer = Writer(self, claim.life, record.run_id, claim=None if conditional else claim)
        # Asked after the claim is there: who prunes that generation from now on has seen the claim (`prune`).
        if continues is not None and self.store.stat(layout.tombstone_key(continues.id)) is None:
            writer.build_on(continues)
        return writer

    def check_place(self) -> RunRecord | None:
        """As `record`, and a place without one is looked over: `claim` would be right here. Writes nothing.

        Raises ConfigError where the place is no run and not empty, or belongs to something else, StoreError.
        """
        record = self.record()
        if record is None:
            self._adopted_run_id()
        return record

    def _adopted_run_id(self) -> str | None:
        """The run id of generations whose record was lost, None for an empty place; ConfigError for any other."""
        names = {*self.store.list_dirs(""), *(info.key for info in self.store.list("", recursive=False))}
        foreign = sorted(name for name in names - layout.KNOWN_NAMES if not name.startswith(".tmp-"))
        if foreign:
            shown = ", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else "")
            raise ConfigError(
                f"{self.uri} is not empty and not a run: it has no {layout.RUN_RECORD}, but holds {shown}.",
                reason=Reason.NOT_A_RUN,
                hint="Choose an empty or new folder for the run; nothing was changed.",
            )
        ids = {committed.manifest.run_id for committed in discover(self.store, None).generations}
        if len(ids) > 1:
            raise ConfigError(
                f"{self.uri} has no {layout.RUN_RECORD} and generations of several runs: {', '.join(sorted(ids))}.",
                reason=Reason.FOREIGN_RUN,
            )
        return ids.pop() if ids else None

    def __repr__(self) -> str:
        return f"Run({self.uri!r})"


class Writer:
    """A claimed life: what may write. Thread safe; one save is in flight at a time."""

    def __init__(self, run: Run, life: int, run_id: str, *, claim: fence.Claim | None = None) -> None:
        """`claim` is given where the store cannot keep two processes from one life: then every fence check reads it."""
        self.run = run
        self.life = life
        self.run_id = run_id
        self._claim = claim
        # Apart from each other: `begin` runs on the training thread and must never wait for a commit's requests.
        self._count_lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self._attempts = 0
        self._newest: GenerationId | None = None
        self._before: Manifest | None = None
        self._swept = False

    @property
    def newest(self) -> GenerationId | None:
        """The newest generation that this life committed."""
        return self._newest

    @property
    def lendable(self) -> Mapping[str, ObjectRef]:
        """By key, the blobs that a save may refer to: those of the generation that this life committed last or, before
        its first commit, went on from."""
        before = self._before
        return {} if before is None else {ref.key: ref for ref in before.bases}

    def build_on(self, before: Committed) -> None:
        """Let saves refer to `before`, which nobody may prune as long as this life has committed nothing else."""
        self._before = before.manifest

    def check_fence(self) -> None:
        """Raises FencedError when a newer life was claimed, or this one by another process; StoreError when that cannot
        be found out."""
        fence.check_fence(self.run.store, self.life, self._claim)

    def begin(self, step: int) -> Open:
        """Begin the generation (life, step). No I/O.

        Raises CommitError (reason STEP_ORDER) for a step at or before this life's newest commit: it would be outranked.
        """
        gen = GenerationId(self.life, step)
        self._check_order(gen)
        return Open(gen, self._next_write_id(), self)

    def _next_write_id(self) -> str:
        with self._count_lock:
            number, self._attempts = self._attempts, self._attempts + 1
        if not self.run.store.capabilities.put_if_absent:
            # Two processes may hold one life here: chance keeps their data apart, where numbers cannot.
            return secrets.token_hex(8)
        return f"a{number}"

    def at(self, store: Store) -> Writer:
        """The same life at another tier, which has to have begun there (`LocalTier.enter`)."""
        return Writer(Run(store, clock=self.run.clock), self.life, self.run_id)

    def same(self, opened: Open) -> Open:
        """The attempt that another tier's writer of this life began, at this tier. No I/O."""
        return Open(opened.id, opened.write_id, self)

    def again(self, committed: Committed) -> Open:
        """A new attempt to bring a generation here that some life committed at another tier. No I/O.

        It keeps its name, so that it stays behind everything of newer lives; only one that is newer than all that this
        life committed can still come (CommitError, reason STEP_ORDER).
        """
        self._check_order(committed.id)
        # Numbers of attempts count within a life: this one's are told from those of the life that wrote it.
        return Open(committed.id, f"l{self.life}{self._next_write_id()}", self)

    @contextmanager
    def committing(self, manifest: Manifest) -> Iterator[None]:
        """Brackets the marker's put by `Written.commit`: commits of one life come one by one and in step order."""
        with self._commit_lock:
            self._check_order(manifest.id)
            yield
            self._newest, self._before = manifest.id, manifest

    def prune(self, retention: Retention, *, damaged: Collection[GenerationId] = ()) -> Pruned:
        """Drop what `retention` lets go, and leftovers. `damaged` generations do not count as kept.

        Raises FencedError (nothing was pruned), StoreError (the next prune goes on where this one stopped).
        """
        self.check_fence()
        # Once per life: unfinished uploads are what dead writers left, so of earlier lives.
        sweep, self._swept = not self._swept, True
        discovery = self.run.discover()
        return prune(
            self.run.store,
            discovery,
            retention,
            life=self.life,
            damaged=damaged,
            held=None if self._before is None else self._before.id,
            check=self.check_fence,
            uploads=sweep,
        )

    def _check_order(self, gen: GenerationId) -> None:
        if self._newest is not None and gen <= self._newest:
            raise CommitError(
                f"Life {self.life} has committed step {self._newest.step}; step {gen.step} would be outranked by it.",
                reason=Reason.STEP_ORDER,
            )

    def __repr__(self) -> str:
        return f"Writer({self.run.uri!r}, life={self.life})"
