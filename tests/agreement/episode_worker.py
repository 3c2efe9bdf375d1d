"""One rank of the process tests: argv = rank world port scenario JSON. Not a test module; started by the tests here.

Signals: SIGUSR1 asks all ranks to save, SIGUSR2 to stop. They reach the agreement by the wakeup fd and a reader thread,
since a Python handler does not run while the main thread waits in a collective.
"""

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from spot_core.pytorch.agree import FreezeAgreement, Request
from spot_core.pytorch.channel import Channel, ChannelTimeout
from spot_core.pytorch.lagged import LaggedAgreement
from spot_core.pytorch.ranks import Ranks

torch.set_num_threads(1)


class Signals:
    """Hands signals to whoever is the present agreement."""

    def __init__(self):
        self.agreement = None
        self.reader, writer = socket.socketpair()
        writer.setblocking(False)
        self.writer = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        while True:
            for number in self.reader.recv(64):
                agreement = self.agreement
                if agreement is None:
                    continue
                if number == signal.SIGUSR2:
                    agreement.request(Request("stop", deadline=time.time() + 30))
                else:
                    agreement.request(Request("save"))


def episode(number, rank, scenario, channel, group, signals, rng):
    """Run until a stop is agreed; everything that was agreed, as [step, kinds]."""
    if scenario.get("lagged"):
        agreement = LaggedAgreement(group, patient_s=scenario.get("patient_s", 20))
    else:
        agreement = FreezeAgreement(channel, poll_s=scenario["poll_s"], patient_s=scenario.get("patient_s", 60))
    signals.agreement = agreement
    dist.barrier()
    channel.set(f"ready/{number}/{rank}", str(os.getpid()))
    seen, grad = [], torch.zeros(1000)
    for step in range(1, 20000):
        time.sleep(scenario["step_s"] * 2 * rng.random())
        if scenario["skew"] and step % scenario["skew"] == 0:
            dist.all_reduce(grad)
        agreed = agreement.boundary(step)
        if agreed is None:
            continue
        seen.append([step, sorted([r.rank, r.kind] for r in agreed.requests), agreed.aborted])
        if agreed.aborted or any(r.kind == "stop" for r in agreed.requests):
            break
    signals.agreement = None
    return seen, agreement


def main():
    rank, world, port = map(int, sys.argv[1:4])
    scenario = json.loads(sys.argv[4])
    store = dist.TCPStore("127.0.0.1", port, world, False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    signals = Signals()
    plain = Channel(dist.PrefixStore("test", store.clone()), rank=rank, world_size=world)
    rng = random.Random(1000 * scenario["seed"] + rank)
    for number in range(scenario["episodes"]):
        channel = Channel.open(Ranks(rank, world, group))
        channel_for_test = Proxy(channel, plain)
        seen, agreement = episode(number, rank, scenario, channel_for_test, group, signals, rng)
        plain.set(f"out/{number}/{rank}", json.dumps(seen))
        if scenario.get("last_words"):  # some rank is dead: nothing joint from here on
            agreement.close()
            os._exit(0)
        try:
            plain.wait([f"out/{number}/{r}" for r in range(world)], 30)
        except ChannelTimeout:
            os._exit(3)
        agreement.close()
    dist.barrier()
    os._exit(0)


class Proxy:
    """The agreement's channel, with the test's own keys beside it."""

    def __init__(self, channel, plain):
        self._channel, self.set = channel, plain.set

    def __getattr__(self, name):
        return getattr(self._channel, name)


if __name__ == "__main__":
    main()
