"""Which generations to let go: pure arithmetic over ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spot_core.errors import ConfigError
from spot_core.layout import GenerationId

__all__ = ["Retention"]


@dataclass(frozen=True)
class Retention:
    """Keep the newest `keep` generations, and long-term the first one at or after every `keep_every` steps."""

    keep: int = 3
    keep_every: int | None = None
    """Steps between long-term generations; None for none."""

    def __post_init__(self) -> None:
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 1:
            raise ConfigError(
                f"keep={self.keep!r}: keep at least 1 generation (2 or more survive a damaged newest one)."
            )
        every = self.keep_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ConfigError(
                f"keep_every={every!r}: give steps as a whole number from 1, or None for no long-term ones."
            )

    def drops(self, ids: Iterable[GenerationId]) -> list[GenerationId]:
        """The ids to drop, oldest first. Never the newest.

        Dropping is stable: what is kept long-term now is kept when newer generations come, since the oldest of each
        bucket of `keep_every` steps is the one that stays.
        """
        ordered = sorted(set(ids))
        kept = set(ordered[-self.keep :])
        if self.keep_every is not None:
            taken: set[int] = set()
            for gen in ordered:
                bucket = gen.step // self.keep_every
                if bucket and bucket not in taken:
                    taken.add(bucket)
                    kept.add(gen)
        return [gen for gen in ordered if gen not in kept]
