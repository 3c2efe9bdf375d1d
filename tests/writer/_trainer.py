"""A trainer in a process of its own, torch-free: `python _trainer.py RUN SIZE`, then commands by standard input.

Prints one line per answer: `writer PID` after the start and after `save`, `half` when half of a snapshot is staged and
the writer is left waiting for the rest, then `part JSON` or `failed MESSAGE` once `rest` made it whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import threading

from spot_core.errors import SaveError
from spot_core.layout import GenerationId, part_target
from spot_core.writer import WriteJob, WriterClient


def _start(run: str, started: list[WriterClient]) -> None:
    client = WriterClient.start(run)
    client.arm(0)
    client.submit(WriteJob(0, part_target(GenerationId(1, 999), "a0", 0), 0, {})).result(60)
    started.append(client)


def _duplicate_sockets() -> None:
    """Descriptors that nothing of ours knows of, as C code may hold them."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.dup(int(name))


def main() -> None:
    run, size = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: None)  # as a session does: a flag, and the loop goes on
    signal.signal(signal.SIGINT, lambda *_: None)
    started: list[WriterClient] = []
    if "--in-thread" in sys.argv:  # a thread that ends once the writer that it started is up
        thread = threading.Thread(target=_start, args=(run, started))
        thread.start()
        thread.join()
    else:
        started.append(WriterClient.start(run))
    client, step, future = started[0], 0, None
    print("writer", client.pid, flush=True)
    for line in sys.stdin:
        command = line.strip()
        if command == "half":
            step += 1
            slab = client.arm(size)
            future = client.submit(WriteJob(0, part_target(GenerationId(1, step), "a0", 0), size, {}))
            slab.data[:size] = bytes([step]) * size
            client.advance(size // 2)
            print("half", client.pid, flush=True)
        elif command == "rest":
            assert future is not None
            client.advance(size)
            try:
                print("part", json.dumps(future.result(60).to_json()), flush=True)
            except SaveError as error:
                print("failed", error, flush=True)
        elif command in ("fork", "fork holding the socket"):  # as a data loader worker, which lives on
            if command != "fork":
                _duplicate_sockets()
            child = os.fork()
            if child == 0:
                threading.Event().wait()
            print("child", child, flush=True)
        elif command == "close":
            client.close()
            print("closed", flush=True)


main()
