"""The only file that spells object keys. Key strings are a stored format: a test pins each of them.

::

    spot.json                                            run record
    lives/000003.json                                    claim of life 3
    generations/000003-000000001200/a0-r00000.blob       bytes of rank 0
    generations/000003-000000001200/a0-r00000.base.blob  what is not expected to change: later ones may refer to it
    generations/000003-000000001200/a0-r00000.index.json what is in these blobs
    generations/000003-000000001200/COMMIT.json          commit marker = manifest
    tombstones/000003-000000001200                       pruned: this name is never live again
    latest.json                                          pointer, a hint
    stops/000003.json                                    life 3 stopped cleanly
    probes/0123456789abcdef-a                            a preflight tries what it may; deleted at once
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "GENERATIONS",
    "KNOWN_NAMES",
    "LIVES",
    "POINTER",
    "PROBES",
    "RUN_RECORD",
    "STOPS",
    "TOMBSTONES",
    "GenerationId",
    "PartTarget",
    "base_key",
    "generation_of",
    "generation_prefix",
    "is_base",
    "life_key",
    "life_of",
    "marker_key",
    "part_target",
    "probe_key",
    "stop_key",
    "tombstone_key",
]

RUN_RECORD = "spot.json"
POINTER = "latest.json"
LIVES = "lives/"
GENERATIONS = "generations/"
TOMBSTONES = "tombstones/"
STOPS = "stops/"
PROBES = "probes/"

# Names at the root of a run; anything else there is not ours.
_FOLDERS = (LIVES, GENERATIONS, TOMBSTONES, STOPS, PROBES)
KNOWN_NAMES = frozenset({RUN_RECORD, POINTER, *(folder.rstrip("/") for folder in _FOLDERS)})

_GENERATION = re.compile(r"(\d{6,})-(\d{12,})")
_NUMBERED = re.compile(r"(?:lives|stops)/(\d{6,})\.json")
_BLOB, _BASE = ".blob", ".base.blob"
_WRITE_ID = re.compile(r"[a-z0-9]{1,64}")


@dataclass(frozen=True, order=True)
class GenerationId:
    """Names one checkpoint of a run. Ordered by (life, step), life first.

    Life first is what keeps a stalled writer of an older life, however many steps it took, from ever
    outranking a newer one (the same reason why Raft compares terms before indexes).
    """

    life: int
    """Number of the life that wrote it, from 1."""
    step: int
    """Optimizer steps taken, from 0."""

    def __post_init__(self) -> None:
        if self.life < 1 or self.step < 0:
            raise ValueError(f"life counts from 1 and step from 0, not life={self.life}, step={self.step}")

    @property
    def name(self) -> str:
        return f"{self.life:06d}-{self.step:012d}"

    @classmethod
    def parse(cls, name: str) -> GenerationId | None:
        """The id spelled by a folder name, None when that is no generation's name."""
        match = _GENERATION.fullmatch(name)
        if match is None or int(match[1]) < 1:
            return None
        found = cls(int(match[1]), int(match[2]))
        # One spelling per id: "0000003-..." would be a second name for the same generation.
        return found if found.name == name else None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class PartTarget:
    """Where one rank's part of one attempt goes."""

    blob_key: str
    index_key: str

    @property
    def base_key(self) -> str:
        return base_key(self.blob_key)


def generation_prefix(gen: GenerationId) -> str:
    return f"{GENERATIONS}{gen.name}/"


def marker_key(gen: GenerationId) -> str:
    return f"{generation_prefix(gen)}COMMIT.json"


def part_target(gen: GenerationId, write_id: str, rank: int) -> PartTarget:
    """Keys of `rank`'s blob and index. `write_id` tells the attempts at one generation apart."""
    if _WRITE_ID.fullmatch(write_id) is None:
        raise ValueError(f"write id must match {_WRITE_ID.pattern}, not {write_id!r}")
    if rank < 0:
        raise ValueError(f"rank counts from 0, not {rank}")
    stem = f"{generation_prefix(gen)}{write_id}-r{rank:05d}"
    return PartTarget(blob_key=f"{stem}{_BLOB}", index_key=f"{stem}.index.json")


def base_key(blob_key: str) -> str:
    """The key of a part's base blob, beside its blob."""
    return blob_key.removesuffix(_BLOB) + _BASE


def is_base(key: str) -> bool:
    """Whether this may be referred to by later generations."""
    return key.endswith(_BASE)


def generation_of(key: str) -> GenerationId | None:
    """The generation in whose folder a key lies, None when it lies in none."""
    if not key.startswith(GENERATIONS):
        return None
    return GenerationId.parse(key.removeprefix(GENERATIONS).partition("/")[0])


def tombstone_key(gen: GenerationId) -> str:
    return f"{TOMBSTONES}{gen.name}"


def life_key(life: int) -> str:
    return f"{LIVES}{life:06d}.json"


def stop_key(life: int) -> str:
    return f"{STOPS}{life:06d}.json"


def probe_key(token: str, name: str) -> str:
    """An object that a preflight puts and deletes. `token` tells preflights apart; discovery never looks here."""
    return f"{PROBES}{token}-{name}"


def life_of(key: str) -> int | None:
    """The life a key under `lives/` or `stops/` speaks of, None when it is no such key."""
    match = _NUMBERED.fullmatch(key)
    return int(match[1]) if match else None
