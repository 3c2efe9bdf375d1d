"""A worker that does what its plan says and writes down what happened to it; torch-free, so that it starts at once.

Usage: worker.py FOLDER PLAN [arguments that are only written down]. PLAN is JSON: {rank: {...}}, "*" for every other
rank, with the keys
  on        {signal name: what}: "ignore", or an exit code to leave with after the save
  save_s    how long the save takes
  after     [seconds, exit code]: leave by itself, so long after all ranks of this attempt have started
  stop      true: leave the note of a clean stop once saved; "run": claim a life and put the stop record into SPOT_RUN;
            "life": claim a life and put no record
  joint     leave when any rank was told to (the agreement, by a file)
Writes FOLDER/<rank>.log: one line per event.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from spot_core.launch.stoprecord import StopRecord, leave_note, write_stop

ENVIRONMENT = ("SPOT_GRACE_S", "SPOT_EXIT_CODE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")


def listens(log: Path, attempt: int) -> bool:
    lines = log.read_text().splitlines() if log.exists() else []
    return any(line.startswith("start ") and line.endswith(f" {attempt}") for line in lines)


def main() -> None:
    folder, plans, rank = Path(sys.argv[1]), json.loads(sys.argv[2]), os.environ["RANK"]
    plan = plans.get(rank, plans.get("*", {}))
    log = (folder / f"{rank}.log").open("a", buffering=1)

    def say(*words: object) -> None:
        log.write(" ".join(map(str, words)) + "\n")

    code: list[int] = []

    def told(signum: int, frame: object) -> None:
        name = signal.Signals(signum).name
        say("signal", name)
        if (what := plan["on"][name]) != "ignore":
            code.append(int(what))
            (folder / "told").touch()

    for name in plan.get("on", {}):
        signal.signal(getattr(signal, name), told)
    for name in ENVIRONMENT:
        say("env", name, os.environ.get(name))
    say("args", json.dumps(sys.argv[3:]))
    say("start", os.getpid(), os.environ["TORCHELASTIC_RESTART_COUNT"])

    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    ranks = range(int(os.environ["WORLD_SIZE"]))
    while "after" in plan and not all(listens(folder / f"{each}.log", attempt) for each in ranks):
        time.sleep(0.02)  # a peer that cannot be told yet would die of the agent's SIGTERM
    began = time.monotonic()
    while not code:
        time.sleep(0.02)
        if "after" in plan and time.monotonic() - began > plan["after"][0]:
            leave = plan["after"][1]
            code.append(leave[min(attempt, len(leave) - 1)] if isinstance(leave, list) else leave)
        if plan.get("joint") and (folder / "told").exists():
            code.append(int(os.environ["SPOT_EXIT_CODE"]))

    until = time.monotonic() + plan.get("save_s", 0)
    while (left := until - time.monotonic()) > 0:
        time.sleep(left)
    record = StopRecord(life=1, step=7, reason="test", exit_code=int(os.environ["SPOT_EXIT_CODE"]))
    stop = plan.get("stop")
    if stop is True:
        leave_note(record)
    elif stop:
        from spot_core.run import Run

        writer = Run.open(os.environ["SPOT_RUN"]).claim()
        if stop == "run":
            write_stop(writer.run.store, replace(record, life=writer.life))
    say("end", code[0])
    os._exit(code[0])


main()
