"""The local tier at a resume: what the machines hold together, and what one machine has to get from another."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from spot_core import layout
from spot_core.errors import KeyExistsError, StoreError
from spot_core.manifest import Manifest
from spot_core.pytorch.ranks import Ranks
from spot_core.store import BytesSource
from spot_core.tiers import Candidate, LocalTier, candidates

if TYPE_CHECKING:
    from spot_core.pytorch.live import Live

log = logging.getLogger(__name__)

_PIECE = 32 << 20


def gather(tier: LocalTier, ranks: Ranks) -> list[Candidate]:
    """Collective: on every rank the same local generations that the machines hold together, newest first."""
    return candidates(ranks.gather(tier.holdings()), tier.run_id)


def fill(tier: LocalTier, ranks: Ranks, candidate: Candidate) -> None:
    """Collective: afterwards every machine has all objects of `candidate`, those it lacked from a rank that has them.

    Between machines over the session's own gloo group, one object after another; one object at a time in memory. What
    could not be read or written is missing or wrong afterwards, which loading finds out.
    """
    if ranks.world_size == 1:
        return
    for ref in candidate.committed.manifest.objects:
        owners = candidate.owners[ref.key]
        if len(owners) == ranks.world_size:
            continue
        mine = ranks.rank in owners
        data = bytearray(0 if mine and ranks.rank != owners[0] else ref.size)
        if ranks.rank == owners[0]:
            try:
                tier.store.get_ranges(ref.key, [(0, [memoryview(data)])])
            except StoreError as error:
                log.warning("spot: rank %d cannot read %s for the others: %s", ranks.rank, ref.key, error)
        with ranks.met():
            for piece in _pieces(data, ref.size):
                dist.broadcast(piece, src=dist.get_global_rank(ranks.group, owners[0]), group=ranks.group)  # type: ignore[arg-type]
        if not mine:
            _put(tier, ref.key, data)
    # Ranks of one machine get the same objects: nobody reads before the one that writes is done.
    with ranks.met():
        dist.barrier(group=ranks.group)


def bring(live: Live, number: int, word: Mapping[str, Any]) -> None:
    """On every rank: its parts of a generation that is only local go on to the store, as save `number`, beside the
    training. `word` is `Lead.take_up`'s. An earlier life's generation lies on every machine as a whole (`fill`).
    """
    manifest = Manifest.from_json(word["manifest"])
    for part in manifest.parts:
        if part.rank % live.channel.world_size == live.channel.rank:  # those of ranks that are no more are shared out
            live.relay.drain(number, part, layout.part_target(manifest.id, word["write_id"], part.rank))


def _pieces(data: bytearray, size: int) -> Iterator[torch.Tensor]:
    """The memory to send from or receive into; for a rank that has the object already, memory to throw away."""
    for at in range(0, size, _PIECE):
        length = min(_PIECE, size - at)
        if data:
            yield torch.frombuffer(data, dtype=torch.uint8, offset=at, count=length)
        else:
            yield torch.empty(length, dtype=torch.uint8)


def _put(tier: LocalTier, key: str, data: bytearray) -> None:
    try:
        tier.store.delete(key)  # what is there has another size
        tier.store.put_blob(key, BytesSource(data))
    except KeyExistsError:
        log.debug("%s came from another rank of this machine", key)
    except StoreError as error:
        log.warning("spot: %s could not be taken over from another machine: %s", key, error)
