"""What earlier lives teach this one: how long they ran, how they ended, what a save cost.

Carried forward in each manifest's meta (``pace``, ``history``), since pruning takes older manifests away; lives that
committed nothing are known by their claims.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from spot_core import layout
from spot_core.errors import FormatError, KeyMissingError
from spot_core.estimate import Estimator, PastLife
from spot_core.manifest import Manifest, decode
from spot_core.store import Store

log = logging.getLogger(__name__)

KEPT = 200
"""Lives carried along."""
_UNSAVED_LIFE_S = 60.0
"""Assumed length of a life that committed nothing: it may have run shorter than to its first save."""


def past_lives(store: Store, manifest: Manifest | None, now_life: int) -> list[PastLife]:
    """All lives before `now_life`, as far as `manifest` (the generation resumed from) and the claims tell."""
    lives: list[PastLife] = []
    last_known = 0
    if manifest is not None:
        lives = [_past_life(entry) for entry in _list(manifest.meta.get("history"))]
        last_known = manifest.life
        lives.append(_ended(store, manifest))
    claims = sorted(life for info in store.list(layout.LIVES) if (life := layout.life_of(info.key)) is not None)
    for life in claims:
        if last_known < life < now_life and not _continues(store, life):
            lives.append(PastLife(_UNSAVED_LIFE_S, interrupted=True, world_size=_world_size(manifest)))
    return lives[-KEPT:]


def to_meta(estimator: Estimator, uptime_s: float) -> dict[str, Any]:
    """What goes into a manifest's meta for the lives after this one."""
    return {
        "history": [asdict(life) for life in list(estimator.history)[-KEPT:]],
        "pace": {
            "blocked_s": estimator.cost_s,
            "staged_s": estimator.staged_p95_s,
            "durable_s": estimator.durable_p95_s,
            "uptime_s": uptime_s,
        },
    }


def estimator_for(world_size: int, manifest: Manifest | None, lives: Sequence[PastLife]) -> Estimator:
    """An estimator that knows the lives, and the costs when the world has the size it had."""
    estimator = Estimator(world_size=world_size, history=lives)
    pace = {} if manifest is None else manifest.meta.get("pace")
    if manifest is not None and manifest.world_size == world_size and isinstance(pace, Mapping):
        estimator.saved(**{name: _number(pace.get(name)) for name in ("blocked_s", "staged_s", "durable_s")})
    return estimator


def _ended(store: Store, manifest: Manifest) -> PastLife:
    """The life that wrote the generation resumed from. It ended, or this life would not begin."""
    pace = manifest.meta.get("pace")
    uptime_s = _number(pace.get("uptime_s")) if isinstance(pace, Mapping) else None
    saved = False
    try:
        stop = decode(store.get(layout.stop_key(manifest.life)), layout.stop_key(manifest.life))
        saved = stop.get("step") == manifest.step
    except (KeyMissingError, FormatError):
        log.debug("life %d left no stop record", manifest.life)
    return PastLife(uptime_s or 0.0, not manifest.finished, saved, manifest.world_size)


def _continues(store: Store, life: int) -> bool:
    """Whether `life` is one that a running process took in addition (see `Session.save`)."""
    try:
        info = decode(store.get(layout.life_key(life)), layout.life_key(life)).get("info")
    except (KeyMissingError, FormatError):
        return False
    return isinstance(info, Mapping) and "continues" in info


def _past_life(entry: Any) -> PastLife:
    return PastLife(
        _number(entry.get("seconds")) or 0.0,
        bool(entry.get("interrupted")),
        bool(entry.get("saved")),
        max(1, int(_number(entry.get("world_size")) or 1)),
    )


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 else None


def _world_size(manifest: Manifest | None) -> int:
    return 1 if manifest is None else manifest.world_size
