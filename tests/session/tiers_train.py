"""A training with two tiers, to be killed: ``python -m tests.session.tiers_train FOLDER RANK WORLD PORT STEPS``.

Every rank is a machine of its own (its local tier is ``FOLDER/local/m<rank>``). Uploads are slow, so that most kills
meet a drain. What it was resumed from, and its last step, go to ``FOLDER/said<rank>.jsonl``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from spot_core.config import Settings
from spot_core.pytorch.session import Session
from spot_core.run import Run

from .job import Training, save, train


def main() -> None:
    folder, rank, world, port, steps = Path(sys.argv[1]), *(int(word) for word in sys.argv[2:6])
    logging.basicConfig(filename=folder / f"log{rank}", level=logging.INFO, format="%(levelname)s %(message)s")
    torch.set_num_threads(1)
    group = None
    if world > 1:
        store = dist.TCPStore("127.0.0.1", port, world, False, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    settings = Settings(
        sources="none",
        interval="3 steps",
        preflight=False,
        local=str(folder / "local" / f"m{rank}"),
        max_upload_mb_s=float(os.environ["TIERS_MB_S"]),
    )
    training = Training(rank, world)
    session = Session(Run.open(str(folder / "run")), settings, rank=rank, world_size=world, group=group)
    with session:
        resumed = session.resume()
        training.take_up(resumed)
        session.start()
        with (folder / f"said{rank}.jsonl").open("a") as said:
            said.write(
                json.dumps({"life": session.life, "from": None if resumed is None else resumed.generation}) + "\n"
            )
        (folder / f"begun{rank}").touch()

        def after(_step: int) -> None:
            with (folder / f"steps{rank}").open("a") as steps_taken:
                steps_taken.write(".")
            time.sleep(0.02)

        train(session, training, steps, after)
        save(session, training, finished=True, wait=True)
    torch.save(training.tensors(), folder / f"final{rank}.pt")
    os._exit(0)


if __name__ == "__main__":
    main()
