"""A rank that does not come to a save, or to the load: `python -m tests.session.absent RANK WORLD FOLDER WHAT ABSENT`.

The rank ABSENT stands still before it, or is killed there ("save and life"). Every other one prints the error that it
ends in.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from spot_core.config import Settings
from spot_core.errors import SpotError
from spot_core.pytorch.session import Patience, Session
from spot_core.run import Run


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    group, absent = dist.new_group(backend="gloo"), rank == int(sys.argv[5])
    what = sys.argv[4]
    settings = Settings(interval="1000 steps", sources="none", writer="thread")
    with Session(
        Run.open(folder / "run"),
        settings,
        rank=rank,
        world_size=world,
        group=group,
        patience=Patience(arrive_s=2.0) if what != "save and life" else Patience(silent_s=0.5),
    ) as session:
        try:
            if absent and what == "load":
                threading.Event().wait()
            session.resume()
            session.start()
            if absent and what == "save and life":
                os.kill(os.getpid(), signal.SIGKILL)
            if absent:
                threading.Event().wait()
            session.save(1, shared={"w": torch.ones(3)}, local={})
        except SpotError as error:
            print(f"{type(error).__name__} {error.reason.value}: {error}", flush=True)
            os._exit(0)  # the group's own end would wait for the rank that stands still


if __name__ == "__main__":
    main()
