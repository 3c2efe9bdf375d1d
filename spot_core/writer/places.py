"""Where a writer writes: the run's store and, where there is one, the local tier in front of it. In both modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from spot_core import memory
from spot_core.errors import SaveError
from spot_core.manifest import Part
from spot_core.store import LocalStore, Store
from spot_core.tiers import LocalTier
from spot_core.writer.drain import DrainJob, drain_part
from spot_core.writer.gate import Gate
from spot_core.writer.meter import Tell, Throttle
from spot_core.writer.part import Landed, write_staged_part


@dataclass(frozen=True)
class Places:
    """`store` is the run's; `throttle` bounds what goes there, `local` what stays on this machine."""

    store: Store
    local: LocalTier | None = None
    throttle: Throttle = field(default_factory=lambda: Throttle(None))

    def write(
        self, gate: Gate, fields: Mapping[str, Any], index: Callable[[], bytes], tell: Tell | None, beside: Executor
    ) -> Landed:
        """Write a staged part to the place that its job names; `beside` as in `write_staged_part`.

        Raises StoreError, OSError, SaveError.
        """
        where: dict[str, Any] = {name: fields[name] for name in ("rank", "blob_key", "index_key", "size")}
        where |= {"based": bool(fields["base_room"]), "index": index, "beside": beside}
        if not fields["local"]:
            return write_staged_part(self.store, gate, **where, throttle=self.throttle, tell=tell)
        tier = self._tier()
        nbytes = int(fields["size"]) + int(fields["base_room"])
        tier.make_room(fields["spare"], fields["extra"], nbytes * memory.local_world_size())
        return write_staged_part(tier.store, gate, **where)

    def drain(self, job: DrainJob, tell: Tell | None) -> Part:
        """Raises as `drain_part`."""
        return drain_part(self._tier().store, self.store, job, self.throttle, tell)

    def to_json(self) -> dict[str, Any]:
        """For a writer process, which opens them again. Carries the storage options: never logged."""
        local = None if self.local is None else {"root": self.local.store.uri, "run_id": self.local.run_id}
        return {
            "uri": self.store.uri,
            "storage_options": dict(self.store.storage_options),
            "local": local,
            "bytes_s": self.throttle.bytes_s,
            "uploads": not isinstance(self.store, LocalStore),
        }

    def _tier(self) -> LocalTier:
        if self.local is None:
            raise SaveError("the writer was given a job for a local tier that it was not told of")
        return self.local
