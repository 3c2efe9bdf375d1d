"""Loop progress in a Lightning checkpoint, so that a resumed fit continues at exactly the next event.

Unrepaired, Lightning 2.5 to 2.6 skips the validation that was due after the saved batch, and after a save at the last
batch of an epoch it skips the end of this epoch or the whole next one. Only plain dicts here, keys as in 2.5 and 2.6.
"""

from __future__ import annotations

from typing import Any

BATCHES = "epoch_loop.batch_progress"
VALIDATION = "epoch_loop.val_loop.batch_progress"
EPOCH_LOOP = "epoch_loop.state_dict"


def as_in_batch_end(checkpoint: dict[str, Any]) -> None:
    """Rewrite a dump taken after the batch as one taken in `on_train_batch_end`, the form Lightning itself writes."""
    for part in ("total", "current"):
        checkpoint["loops"]["fit_loop"][BATCHES][part]["completed"] -= 1


def repair(checkpoint: dict[str, Any], *, validation_due: bool, last_batch: bool) -> None:
    """Make the checkpoint of a batch end continue with the validation or epoch end that follows the batch."""
    loop = checkpoint["loops"]["fit_loop"]
    if validation_due:
        # Looks like a checkpoint taken in the middle of that validation: Lightning then runs it from its start.
        _complete(loop)
        progress = loop[VALIDATION]
        done = progress["total"]["completed"]
        progress["total"] = {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
        progress["current"] = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
        progress["is_last_batch"] = False
    elif last_batch:
        # The exhausted loader says so at once, and the epoch ends as usual.
        _complete(loop)
        loop[EPOCH_LOOP]["_batches_that_stepped"] += 1


def _complete(loop: dict[str, Any]) -> None:
    for part in ("total", "current"):
        loop[BATCHES][part]["completed"] += 1


def batch_in_epoch(checkpoint: dict[str, Any]) -> int:
    """Batches of the present epoch that are done."""
    return int(checkpoint["loops"]["fit_loop"][BATCHES]["current"]["ready"])


def epoch(checkpoint: dict[str, Any]) -> int:
    """Epochs that are done."""
    return int(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"])
