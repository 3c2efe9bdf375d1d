"""Agreement between real processes with real signals: randomised episodes, killed and stopped ranks."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from spot_core.pytorch.channel import Channel

WORKER = Path(__file__).with_name("episode_worker.py")
pytestmark = pytest.mark.dist


class Ranks:
    """`world` workers and the store that they meet over, hosted here as an agent would."""

    def __init__(self, world, **scenario):
        self.world = world
        self.server = dist.TCPStore("127.0.0.1", 0, world, True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self.plain = Channel(dist.PrefixStore("test", self.server.clone()), rank=-1, world_size=world)
        scenario = {"episodes": 1, "seed": 0, "poll_s": 0.05, "step_s": 0.002, "skew": 1, **scenario}
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.workers = [
            subprocess.Popen(
                [sys.executable, WORKER, *map(str, (rank, world, self.server.port)), json.dumps(scenario)], env=env
            )
            for rank in range(world)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self.workers:
            worker.kill()
            worker.wait()

    def ready(self, number):
        return list(map(int, self.plain.wait([f"ready/{number}/{r}" for r in range(self.world)], 120)))

    def outs(self, number, ranks=None, timeout_s=60):
        ranks = range(self.world) if ranks is None else ranks
        return [json.loads(out) for out in self.plain.wait([f"out/{number}/{r}" for r in ranks], timeout_s)]


def run_episodes(episodes, seed, **scenario):
    """Signals at random instants to random ranks, then a stop to one or several; all ranks must tell the same story."""
    rng = random.Random(seed)
    saves = 0
    with Ranks(4, episodes=episodes, seed=seed, **scenario) as ranks:
        for number in range(episodes):
            pids = ranks.ready(number)
            for _ in range(rng.choice([0, 1, 2])):
                time.sleep(rng.random() * 0.05)
                os.kill(rng.choice(pids), signal.SIGUSR1)
            time.sleep(rng.random() * 0.1)
            for pid in rng.sample(pids, rng.choice([1, 1, 1, 2, 4])):
                os.kill(pid, signal.SIGUSR2)
                time.sleep(rng.random() * 0.01)
            outs = ranks.outs(number)
            assert outs[1:] == outs[:1] * 3, f"episode {number}"
            assert not any(aborted for _, _, aborted in outs[0])
            assert "stop" in {kind for _, kind in outs[0][-1][1]}
            saves += sum(kind == "save" for _, asked, _ in outs[0] for _, kind in asked)
        for worker in ranks.workers:
            assert worker.wait(timeout=60) == 0
    assert saves > 0 or episodes < 5


@pytest.mark.parametrize(
    "scenario",
    [{"skew": 1}, {"skew": 8}, {"skew": 0, "step_s": 0.0003}, {"lagged": True}],
    ids=["ddp", "skewed", "free", "lagged"],
)
def test_episodes(scenario):
    run_episodes(10, seed=7, **scenario)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_many_episodes(seed):
    skew = [1, 8, 1, 3, 0][seed]
    poll_s = [0.05, 0.05, 0.3, 0.1, 0.05][seed]
    run_episodes(100, seed=100 + seed, skew=skew, poll_s=poll_s, step_s=0.0005 if seed == 4 else 0.002)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_killed_during_agreement_ends_bounded(victim):
    survivors = [rank for rank in range(4) if rank != victim]
    with Ranks(4, skew=0, patient_s=2.0, last_words=True) as ranks:
        pids = ranks.ready(0)
        os.kill(pids[victim], signal.SIGSTOP)  # it cannot answer, whatever the timing
        os.kill(pids[1], signal.SIGUSR2)
        time.sleep(0.3)  # the round is open now
        os.kill(pids[victim], signal.SIGKILL)
        for out in ranks.outs(0, survivors, timeout_s=20):
            (_, _, aborted) = out[-1]
            assert f"rank {victim}" in aborted
        for rank in survivors:
            assert ranks.workers[rank].wait(timeout=30) == 0


def test_a_rank_that_comes_late_takes_the_abort_too():
    with Ranks(4, skew=0, patient_s=1.0, last_words=True) as ranks:
        pids = ranks.ready(0)
        os.kill(pids[2], signal.SIGSTOP)
        os.kill(pids[1], signal.SIGUSR2)
        others = ranks.outs(0, [0, 1, 3], timeout_s=20)
        os.kill(pids[2], signal.SIGCONT)
        late = ranks.outs(0, [2], timeout_s=20)
        for out in (*others, *late):
            assert "rank 2" in out[-1][2]


def test_without_a_store_a_silent_rank_ends_bounded_too():
    with Ranks(4, skew=0, lagged=True, last_words=True, patient_s=4.0) as ranks:
        pids = ranks.ready(0)
        os.kill(pids[2], signal.SIGSTOP)
        os.kill(pids[1], signal.SIGUSR2)
        (asker,) = ranks.outs(0, [1], timeout_s=20)
        assert "not every rank has come to the same boundary" in asker[-1][2]
        # The others asked for nothing, and wait for longer.
        for out in ranks.outs(0, [0, 3], timeout_s=20):
            assert out[-1][2].startswith("the ranks could not agree")
