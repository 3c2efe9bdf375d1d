"""A rank that does not come to a save, or to the load: `python -m tests.session.absent RANK WORLD FOLDER WHAT ABSENT`.

The rank ABSENT stands still before it, or is killed there ("save and life"), stopped inside of the load ("stopped"), or
reads there without an end ("reading"). Every other one prints the error that it ends in.
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
from spot_core.manifest import Manifest
from spot_core.pytorch.session import Patience, Session
from spot_core.run import Run


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    # Rank 0's process hosts the store, as it does where no launcher does.
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        (folder / "new").write_text(str(store.port))
        (folder / "new").rename(port)
    else:
        while not port.exists():
            threading.Event().wait(0.05)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    group, absent = dist.new_group(backend="gloo"), rank == int(sys.argv[5])
    what = sys.argv[4]
    settings = Settings(interval="1000 steps", sources="none", writer="thread")
    patience = Patience(arrive_s=2.0) if what in ("save", "load", "reading") else Patience(silent_s=0.5)

    def check(manifest: Manifest) -> None:
        if absent and what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if absent and what == "reading":
            threading.Event().wait()

    with Session(
        Run.open(folder / "run"),
        settings,
        rank=rank,
        world_size=world,
        group=group,
        patience=patience,
        check=check,
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
