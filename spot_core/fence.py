"""Lives: claiming the next one, and noticing that a newer one has begun.

The fence check is advisory in time (a writer can stall right after it); what makes it safe is that generations order
by life first, so that nothing an older life still writes can outrank a newer life's commit.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from spot_core import layout
from spot_core.clock import Clock
from spot_core.errors import FencedError, FormatError, KeyExistsError, KeyMissingError
from spot_core.layout import GenerationId
from spot_core.manifest import FORMAT, JSON, decode, encode
from spot_core.store import Store, put_once

__all__ = ["Claim", "builds_on", "check_fence", "claim_life", "newest_life"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claim:
    """What a process put to take a life; no other process can have put the same."""

    life: int
    data: bytes


def newest_life(store: Store) -> int:
    """The newest life claimed, 0 when none was. Raises StoreError when that cannot be found out."""
    lives = (layout.life_of(info.key) for info in store.list(layout.LIVES))
    return max((life for life in lives if life is not None), default=0)


def check_fence(store: Store, life: int, claim: Claim | None = None) -> None:
    """Raises FencedError when a life newer than `life` has been claimed, StoreError when that cannot be found out.

    With `claim`, which a store without put-if-absent makes necessary, also raises it when another process has taken
    the same life: there the last claim of a life stays, so of several claimants exactly one finds its own.
    """
    newest = newest_life(store)
    if newest > life:
        raise FencedError(
            f"Life {life} of the run at {store.uri} is superseded by life {newest}: this process must stop writing.",
            hint="All committed generations are whole. If both were meant to run, give each a run of its own.",
        )


    if claim is not None and store.get(layout.life_key(life)) != claim.data:
        raise FencedError(
            f"Life {life} of the run at {store.uri} was claimed by another process at the same moment, and is its own: "
            "this process must stop writing.",
            hint="This store has no put-if-absent: start one job at a time there.",
        )


def builds_on(store: Store, life: int) -> GenerationId | None:
    """The generation that `life` said it would go on from: its saves may refer to it. Raises StoreError."""
    key = layout.life_key(life)
    try:
        return GenerationId.parse(str(decode(store.get(key), key).get("continues")))
    except (KeyMissingError, FormatError):
        return None


def claim_life(
    store: Store, clock: Clock, info: Mapping[str, JSON], *, continues: GenerationId | None = None
) -> Claim:
    """Claim the next life. Of several claimants each gets a number of its own (see `check_fence` where it does not).

    `info` goes into the claim for people to read (host, process, release); nothing secret. `continues` is the
    generation that was loaded (see `builds_on`).
    """
    # Generations count too: with the claims lost, a life that reused a number would share names with its forebear.
    found = (GenerationId.parse(name) for name in store.list_dirs(layout.GENERATIONS))
    life = 1 + max([newest_life(store), *(gen.life for gen in found if gen is not None)])
    nonce = secrets.token_hex(16)
    while True:
        claim: dict[str, JSON] = {
            "format": FORMAT,
            "life": life,
            "nonce": nonce,
            "created": clock.now(),
            "info": info,
        }
        if continues is not None:
            claim["continues"] = continues.name
        data = encode(claim)
        try:
            put_once(store, layout.life_key(life), data)
        except KeyExistsError:
            _log.info("Life %d at %s was claimed by another process just now; trying the next.", life, store.uri)
            life += 1
        else:
            return Claim(life, data)
