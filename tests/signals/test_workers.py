"""DataLoader workers under real signals to a real process group."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from spot_core.pytorch.workers import ImmuneInit, protect

TRAINER = Path(__file__).with_name("worker_trainer.py")

METHODS = ["fork", pytest.param("spawn", marks=pytest.mark.slow), pytest.param("forkserver", marks=pytest.mark.slow)]


class Trainer:
    def __init__(self, method, *, persistent=False, protected=True, stuck=False, ending="loop"):
        flags = [method, *(str(int(flag)) for flag in (persistent, protected, stuck)), ending]
        self.process = subprocess.Popen(
            [sys.executable, str(TRAINER), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def read(self, word: str) -> list[str]:
        """The rest of the next line that begins with ``word``."""
        for line in self.process.stdout:
            first, *rest = line.split()
            if first == word:
                return rest
        raise AssertionError(self.process.stderr.read())

    def workers(self) -> list[psutil.Process]:
        return [psutil.Process(int(pid)) for pid in self.read("pids")]

    def signal_group(self, signum: int = signal.SIGTERM) -> None:
        os.killpg(self.process.pid, signum)

    def go(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def finish(self) -> str:
        """Exit well within a minute and without complaint; what was printed to stderr."""
        assert self.process.wait(60) == 0
        return self.process.stderr.read()


@pytest.fixture
def trainer() -> Iterator:
    started: list[Trainer] = []

    def start(*args, **kwargs) -> Trainer:
        started.append(Trainer(*args, **kwargs))
        return started[-1]

    yield start
    for one in started:
        try:
            os.killpg(one.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        one.process.communicate()


def gone(workers: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(workers, timeout=60)
    return not alive


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_workers_outlive_signals_to_the_group_and_the_data_is_whole(trainer, method, persistent):
    one = trainer(method, persistent=persistent)
    pids = []
    for _ in range(2 if persistent else 1):
        workers = one.workers()
        for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            one.signal_group(signum)
        one.go()
        assert one.read("seen") == ["True", "2"]
        pids.append({worker.pid for worker in workers})
    assert all(these == pids[0] for these in pids)
    one.read("end")
    one.finish()
    assert gone(workers)


def test_without_protection_the_same_signal_ends_the_training(trainer):
    """What the trainer dies of is a race: torch's handler of SIGCHLD, or a queue whose other end is gone. The former
    may even strike while the traceback of the latter is printed, so that its frames are lost: only its end is certain.
    """
    one = trainer("fork", protected=False)
    one.workers()
    one.signal_group()
    one.go()
    said, complaint = one.process.communicate(timeout=60)
    assert one.process.returncode == 1
    assert "Traceback" in complaint
    assert "seen" not in said
    assert "end" not in said


@pytest.mark.parametrize("method", METHODS)
def test_the_users_init_function_runs_and_its_programs_can_be_terminated(trainer, method):
    one = trainer(method)
    assert sorted((one.read("init"), one.read("init"))) == [["0", "-15"], ["1", "-15"]]
    one.read("pids")
    one.go()
    one.finish()


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS)
def test_a_stuck_worker_ends_when_the_iterator_goes(trainer, method, persistent):
    """torch waits 5 s for it and then sends what a protected worker would not hear as a signal."""
    one = trainer(method, persistent=persistent, stuck=True, ending="delete")
    workers = one.workers()
    one.go()
    one.read("end")
    assert gone(workers)
    assert "Traceback" not in one.finish()


@pytest.mark.parametrize("stuck", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS)
def test_a_trainer_that_ends_with_its_iterator_alive_does_not_hang(trainer, method, stuck):
    one = trainer(method, persistent=True, stuck=stuck, ending="none")
    workers = one.workers()
    one.go()
    one.read("end")
    assert "Traceback" not in one.finish()
    assert gone(workers)


@pytest.mark.parametrize("method", METHODS)
def test_workers_do_not_outlive_a_trainer_that_is_killed(trainer, method):
    one = trainer(method, persistent=True, stuck=True, ending="wait")
    workers = one.workers()
    one.go()
    one.read("seen")
    one.process.kill()
    assert gone(workers)


def newborn(trainer: psutil.Process, method: str) -> list[psutil.Process]:
    """The workers, in whatever state of their birth: not the helpers of multiprocessing, nor what workers start."""
    children = trainer.children()
    if method == "fork":
        return children
    commands = [(child, " ".join(child.cmdline())) for child in children]
    if method == "spawn":
        return [child for child, command in commands if "spawn_main" in command]
    return [worker for child, command in commands if "forkserver import" in command for worker in child.children()]


@pytest.mark.parametrize("method", METHODS)
def test_a_signal_while_workers_are_being_born(trainer, method):
    one = trainer(method)
    parent = psutil.Process(one.process.pid)
    hit: set[int] = set()
    # Workers only: the trainer itself may not be ready yet.
    while len(hit) < 2:
        for worker in newborn(parent, method):
            worker.send_signal(signal.SIGTERM)
            hit.add(worker.pid)
        assert one.process.poll() is None, one.process.stderr.read()
    workers = one.workers()
    assert {worker.pid for worker in workers} == hit
    one.go()
    assert one.read("seen") == ["True", "2"]
    one.finish()
    assert gone(workers)


def chained(worker_id: int) -> None:
    torch.manual_seed(worker_id)


def test_protecting_is_idempotent_and_keeps_what_was_chosen():
    loader = DataLoader([1, 2], num_workers=1, worker_init_fn=chained, multiprocessing_context="spawn")
    assert protect(loader) is loader
    context, init = loader.multiprocessing_context, loader.worker_init_fn
    protect(loader)
    assert loader.multiprocessing_context is context
    assert loader.worker_init_fn is init
    assert context.get_start_method() == "spawn"
    assert init.before is chained


def test_a_host_that_copies_the_loader_keeps_the_protection():
    loader = protect(DataLoader([1, 2], num_workers=1))
    copy = DataLoader(
        [3], num_workers=1, worker_init_fn=loader.worker_init_fn, multiprocessing_context=loader.multiprocessing_context
    )
    init = copy.worker_init_fn
    assert protect(copy).worker_init_fn is init


def test_the_init_function_can_be_pickled():
    again = pickle.loads(pickle.dumps(ImmuneInit(chained)))
    assert again.before is chained


def test_a_loader_without_workers_is_left_alone():
    loader = DataLoader([1, 2])
    protect(loader)
    assert loader.multiprocessing_context is None
    assert loader.worker_init_fn is None


def test_a_context_of_another_kind_is_left_alone_with_a_warning(caplog):
    import multiprocessing.context

    class Own(multiprocessing.context.ForkContext):
        pass

    loader = DataLoader([1, 2], num_workers=1, multiprocessing_context=Own())
    protect(loader)
    assert isinstance(loader.multiprocessing_context, Own)
    assert loader.worker_init_fn is None
    assert "not protected from signals" in caplog.text


def test_the_start_method_is_not_fixed_by_protecting():
    code = """
import multiprocessing
from torch.utils.data import DataLoader
from spot_core.pytorch.workers import protect
loader = protect(DataLoader([1, 2], num_workers=1))
multiprocessing.set_start_method("spawn")
print(loader.multiprocessing_context.get_start_method() in multiprocessing.get_all_start_methods())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("hanging", [0, 1, 2])
def test_a_worker_that_hangs_in_its_fork_is_forked_again(tmp_path, hanging):
    """Both of them are there in the end, and nothing is left of those that hung."""
    said, forks = trained_with_forks_that_hang(tmp_path, hanging)
    assert said[-1] == f"seen {list(range(8))}"
    assert sum("hung in its fork" in line for line in said) == hanging
    assert len(forks) == 2 + hanging
    assert not any(map(psutil.pid_exists, forks))


def test_when_all_forks_hang_that_is_an_error(tmp_path):
    said, forks = trained_with_forks_that_hang(tmp_path, 100)
    assert said[-1].startswith("error No DataLoader worker could be forked: 3 in a row")
    assert "forkserver" in said[-1]
    assert len(forks) == 3
    assert not any(map(psutil.pid_exists, forks))


def trained_with_forks_that_hang(folder: Path, hanging: int) -> tuple[list[str], list[int]]:
    """What `fork_hangs.py` said, and the processes that it forked."""
    count = folder / "forks"
    command = [sys.executable, str(TRAINER.with_name("fork_hangs.py")), str(hanging), str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return done.stdout.splitlines(), [int(pid) for pid in count.read_text().split()]
