"""A trainer some of whose forks hang before their first Python instruction of their own, as with a lock that was held.

Arguments: how many of its forks hang; the file that counts them.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from spot_core.errors import SpotError
from spot_core.pytorch import workers


def hang_at_first(hanging: int, count: Path) -> None:
    with count.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if len(count.read_text().split()) <= hanging:
        time.sleep(10_000)


def main(hanging: int, count: Path) -> None:
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    torch.set_num_threads(1)
    workers.FORKED_S = 1.0
    os.register_at_fork(after_in_child=lambda: hang_at_first(hanging, count))
    loader = workers.protect(DataLoader(range(8), num_workers=2, multiprocessing_context="fork"))
    try:
        print("seen", [int(batch) for batch in loader], flush=True)
    except SpotError as error:
        print("error", error, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
