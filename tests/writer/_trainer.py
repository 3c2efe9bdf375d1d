"""A trainer in a process of its own, torch-free: `python _trainer.py RUN SIZE`, then commands by standard input.

Prints one line per answer: `writer PID` after the start and after `save`, `half` when half of a snapshot is staged and
the writer is left waiting for the rest, then `part JSON` or `failed MESSAGE` once `rest` made it whole.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from spot_core.errors import SaveError
from spot_core.layout import GenerationId, part_target
from spot_core.writer import WriteJob, WriterClient


def main() -> None:
    run, size = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: None)  # as a session does: a flag, and the loop goes on
    signal.signal(signal.SIGINT, lambda *_: None)
    started: list[WriterClient] = []
    if "--in-thread" in sys.argv:  # a thread that ends right after it started the writer
        thread = threading.Thread(target=lambda: started.append(WriterClient.start(run)))
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
        elif command == "fork":  # as a data loader worker: lives on, with everything it inherited
            child = os.fork()
            if child == 0:
                threading.Event().wait()
            print("child", child, flush=True)
        elif command == "close":
            client.close()
            print("closed", flush=True)


main()
