"""Plain collectives over the session's own gloo group, for the start of a life: objects and errors reach every rank.

A rank that does not come to one would hold up the others in it until the group's time-out, and nobody could say which
rank it is. So they come to `place` first, where the session has one.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from spot_core.errors import ConfigError, SpotError

T = TypeVar("T")


class Place(Protocol):
    """Where ranks wait for each other, as `arrival.Meeting`."""

    def tick(self) -> None:
        """This rank gets further."""

    def meet(self) -> None:
        """All have come; raises RestoreError, naming who does not."""

    def left(self) -> None:
        """The collective is over."""

    def close(self) -> None:
        """There will be no other."""


class Ranks:
    """All ranks of a session; with one rank nothing is communicated."""

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} and world_size={world_size} are no rank and size of a world")
        if world_size > 1:
            if group is None or not dist.is_initialized():
                raise ConfigError(
                    f"{world_size} ranks need a default process group and a gloo group that nothing else uses",
                    hint="Call torch.distributed.init_process_group, then new_group(backend='gloo'), on every rank.",
                )
            if dist.get_world_size(group) != world_size or dist.get_rank(group) != rank:
                raise ConfigError(f"the group has other ranks than rank={rank}, world_size={world_size} say")
        self.rank, self.world_size, self.group = rank, world_size, group
        self.place: Place | None = None

    def tick(self) -> None:
        """This rank gets further with what the others wait for."""
        if self.place is not None:
            self.place.tick()

    def part(self) -> None:
        """No rank will be waited for any more."""
        if self.place is not None:
            self.place.close()
        self.place = None

    @contextmanager
    def met(self) -> Iterator[None]:
        """For a collective of all ranks inside. Raises RestoreError, naming a rank that does not come."""
        if self.place is not None:
            self.place.meet()
        yield
        if self.place is not None:
            self.place.left()

    def from_first(self, do: Callable[[], T]) -> T:
        """Collective: what `do` gave on rank 0, on every rank; or what it raised, on every rank."""
        if self.world_size == 1:
            return do()
        word: list[Any] = [None, None]
        if self.rank == 0:
            word = list(_tried(do))
        assert self.group is not None
        with self.met():
            dist.broadcast_object_list(word, src=dist.get_global_rank(self.group, 0), group=self.group)
        value, error = word
        if error is not None:
            raise error
        result: T = value
        return result

    def everywhere(self, do: Callable[[], T]) -> tuple[T | None, list[BaseException | None]]:
        """Collective: every rank does `do`; this rank's result, and by rank what was raised."""
        value, error = _tried(do)
        return value, self.gather(error)

    def gather(self, mine: Any) -> list[Any]:
        """Collective: by rank what each gave."""
        found: list[Any] = [mine]
        if self.world_size > 1:
            found = [None] * self.world_size
            with self.met():
                dist.all_gather_object(found, mine, group=self.group)
        return found

    def together(self, do: Callable[[], T]) -> T:
        """Collective: every rank does `do`; when one fails, its error is raised on every rank (the lowest rank's)."""
        value, errors = self.everywhere(do)
        for rank, error in enumerate(errors):
            if error is not None:
                error.add_note(f"raised on rank {rank}") if hasattr(error, "add_note") else None
                raise error
        result: T = value  # type: ignore[assignment]
        return result


def _tried(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return do(), None
    except Exception as error:  # noqa: BLE001 - it is raised on every rank, this one included
        return None, _portable(error)


def _portable(error: Exception) -> Exception:
    """The error itself where it can travel between processes, else its text."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes, made in this line
    except Exception:  # noqa: BLE001 - whatever the error's own pickling raises
        return SpotError(f"{type(error).__name__}: {error}")
    return error
