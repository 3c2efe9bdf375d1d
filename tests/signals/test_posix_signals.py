"""Real signals. What has to do with the main thread runs in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from spot_core.errors import ConfigError
from spot_core.signals import PosixSignals, Watcher


def run(code: str, timeout: float = 60) -> list[str]:
    """Run ``code`` in a new interpreter and return the lines that it printed; it has to end well."""
    prelude = """
        import os, signal, sys, threading
        from spot_core.signals import PosixSignals, Watcher
        def say(*words): print(*words, flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_signal_is_a_notice_with_the_grace_and_the_process_lives():
    assert run("""
        w = Watcher([PosixSignals(grace_s=12)])
        w.start()
        from spot_core.clock import SYSTEM_CLOCK
        before = SYSTEM_CLOCK.now()
        os.kill(os.getpid(), signal.SIGTERM)
        assert w.arrived.wait(30)
        (notice,) = w.current()
        say(notice.id, notice.kind.value, notice.source, before + 12 <= notice.deadline <= SYSTEM_CLOCK.now() + 12)
        w.close()
        say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.set_wakeup_fd(-1))
    """) == ["signal:sigterm preemption sigterm True", "True -1"]


def test_a_main_thread_in_c_code_does_not_delay_the_notice():
    """The main thread waits in C, restarting after signals as a collective does, for what only the notice releases."""
    assert run("""
        import ctypes
        libc = ctypes.CDLL(None)             # lets go of the interpreter lock during a call
        mutex = ctypes.create_string_buffer(64)
        libc.pthread_mutex_init(mutex, None)
        libc.pthread_mutex_lock(mutex)
        order = []
        signal.signal(signal.SIGTERM, lambda s, f: order.append("Python handler"))
        def on_notice(notice):
            order.append(notice.id)
            libc.pthread_mutex_unlock(mutex)
        w = Watcher([PosixSignals()], on_notice=on_notice)
        w.start()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        libc.pthread_mutex_lock(mutex)
        threading.Event().wait(0.1)
        say(order)
        w.close()
    """) == ["['signal:sigterm', 'Python handler']"]


def test_a_second_signal_changes_nothing():
    assert run("""
        heard = []
        w = Watcher([PosixSignals()], on_notice=heard.append)
        w.start()
        os.kill(os.getpid(), signal.SIGTERM)
        assert w.arrived.wait(30)
        first = w.deadline()
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(1.2)
        say(len(heard), w.deadline() == first)
        w.close()
    """) == ["1 True"]


def test_the_handler_that_was_there_runs_too_and_comes_back():
    assert run("""
        calls = []
        def mine(signum, frame): calls.append(signum)
        signal.signal(signal.SIGTERM, mine)
        w = Watcher([PosixSignals()])
        w.start()
        os.kill(os.getpid(), signal.SIGTERM)
        assert w.arrived.wait(30)
        w.close()
        say([int(c) for c in calls], signal.getsignal(signal.SIGTERM) is mine)
    """) == ["[15] True"]


@pytest.mark.parametrize("chain", ["False", "lambda s, before: before.__name__ != 'collective'"])
def test_a_handler_can_be_kept_from_running(chain):
    assert run(f"""
        def collective(signum, frame): say("a collective in a handler")
        def harmless(signum, frame): say("harmless")
        signal.signal(signal.SIGTERM, collective)
        signal.signal(signal.SIGUSR1, harmless)
        s = PosixSignals(["SIGTERM", "SIGUSR1"], chain={chain})
        w = Watcher([s])
        w.start()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert w.arrived.wait(30)
        w.close()
        say(signal.getsignal(signal.SIGTERM) is collective)
    """) == ([] if chain == "False" else ["harmless"]) + ["True"]


def test_a_host_that_takes_the_signal_later_is_retaken_and_chained_without_a_loop():
    assert run("""
        order = []
        signal.signal(signal.SIGTERM, lambda s, f: order.append("first"))
        source = PosixSignals()
        w = Watcher([source])
        w.start()
        ours = signal.getsignal(signal.SIGTERM)
        def host(s, f):
            order.append("host")
            ours(s, f)                       # a host that chains what it found
        signal.signal(signal.SIGTERM, host)
        say(source.reinstall(), source.reinstall())
        os.kill(os.getpid(), signal.SIGTERM)
        assert w.arrived.wait(30)
        say(order)
        w.close()
        say(signal.getsignal(signal.SIGTERM) is host)
        order.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        say(order)                           # closed, it only passes on
    """) == ["['SIGTERM'] []", "['host', 'first']", "True", "['host', 'first']"]


def test_a_host_that_takes_the_signal_and_chains_still_lets_the_notice_through():
    assert run("""
        w = Watcher([PosixSignals()])
        w.start()
        ours = signal.signal(signal.SIGTERM, lambda s, f: ours(s, f))
        os.kill(os.getpid(), signal.SIGTERM)
        say(w.arrived.wait(30))
        w.close()
    """) == ["True"]


def test_the_wakeup_descriptor_of_asyncio_still_gets_its_bytes():
    assert run("""
        import asyncio
        async def main():
            loop = asyncio.get_running_loop()
            got = asyncio.Event()
            loop.add_signal_handler(signal.SIGUSR1, got.set)
            w = Watcher([PosixSignals()])
            w.start()
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.wait_for(got.wait(), 30)
            say("asyncio", w.arrived.is_set())
            os.kill(os.getpid(), signal.SIGTERM)
            say(await asyncio.to_thread(w.arrived.wait, 30))
            w.close()
            got.clear()
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.wait_for(got.wait(), 30)
            say("still")
        asyncio.run(main())
    """) == ["asyncio False", "True", "still"]


def test_a_library_that_takes_the_wakeup_descriptor_only_delays_the_notice():
    assert run("""
        w = Watcher([PosixSignals()])
        w.start()
        r, other = os.pipe()
        os.set_blocking(other, False)
        signal.set_wakeup_fd(other)
        os.kill(os.getpid(), signal.SIGTERM)
        say(w.arrived.wait(30))
        w.close()
        say(signal.set_wakeup_fd(-1) == other)
    """) == ["True", "True"]


def test_other_signals_are_no_notices():
    assert run("""
        signal.signal(signal.SIGUSR1, lambda s, f: None)
        w = Watcher([PosixSignals()])
        w.start()
        os.kill(os.getpid(), signal.SIGUSR1)
        say(w.arrived.wait(1))
        w.close()
    """) == ["False"]


def test_a_forked_child_is_as_if_nothing_had_been_installed():
    """It can be terminated, gives no notice, and does not write to the parent's pipe."""
    assert run("""
        w = Watcher([PosixSignals(["SIGTERM", "SIGUSR1"])])
        w.start()
        r, ready = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(ready, bytes([signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.set_wakeup_fd(-1) == -1]))
            while True:
                signal.pause()
        say(list(os.read(r, 2)))
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        say(os.WTERMSIG(status), w.arrived.wait(1))
        os.kill(os.getpid(), signal.SIGTERM)
        say(w.arrived.wait(30))
        w.close()
    """) == ["[1, 1]", "15 False", "True"]


def test_a_forked_pool_ends_when_its_parent_ends_it():
    assert run("""
        import multiprocessing
        w = Watcher([PosixSignals()])
        w.start()
        pool = multiprocessing.get_context("fork").Pool(2)
        say(pool.map(abs, [-1, -2]))
        pool.terminate()
        pool.join()
        say("ended")
        w.close()
    """) == ["[1, 2]", "ended"]


def test_outside_the_main_thread_the_other_sources_work_with_a_warning(caplog):
    class Other:
        name, per_node, interval_s, state = "other", True, 0.01, "fine"

        def open(self):
            return True

        def poll(self):
            from spot_core.signals import Notice, NoticeKind

            return [Notice("n", NoticeKind.PREEMPTION, "other")]

        def close(self):
            pass

    before = signal.getsignal(signal.SIGTERM)
    signals = PosixSignals()
    watcher = Watcher([signals, Other()])
    thread = threading.Thread(target=watcher.start)
    thread.start()
    thread.join()
    assert watcher.arrived.wait(20)
    assert "signals are not watched: not started in the main thread" in caplog.text
    assert signals.state.startswith("off: not started in the main thread")
    assert signal.getsignal(signal.SIGTERM) is before
    watcher.close()


def test_closed_outside_the_main_thread_a_signal_does_what_it_did_before():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, signal, threading\n"
            "from spot_core.signals import PosixSignals\n"
            "s = PosixSignals(); s.open()\n"
            "t = threading.Thread(target=s.close); t.start(); t.join()\n"
            "os.kill(os.getpid(), signal.SIGTERM)\n"
            "signal.pause()",
        ],
        timeout=60,
    )
    assert done.returncode == -signal.SIGTERM


def test_closed_under_a_host_that_chains_nothing_is_killed():
    assert run("""
        source = PosixSignals()
        source.open()
        ours = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda s, f: ours(s, f))
        source.close()
        os.kill(os.getpid(), signal.SIGTERM)
        say("alive")
    """) == ["alive"]


def test_descriptors_are_given_back():
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Watcher([PosixSignals(["SIGUSR2"])]):
            pass
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("names", [["SIGKILL"], ["sigterm"], [], ["SIGTERM", "SIGSEGV"]])
def test_signals_that_cannot_be_watched_are_refused(names):
    with pytest.raises(ConfigError, match="SIGUSR1"):
        PosixSignals(names)


def test_a_process_that_leaves_because_it_was_told_to_is_not_cut_short_at_its_exit():
    assert run("""
        import atexit
        from spot_core.signals.posix_signals import ignore_at_exit
        def told_again():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            say("still here")
        atexit.register(told_again)
        source = PosixSignals(["SIGUSR1"])
        source.open()
        ignore_at_exit()
        source.close()
        say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)  # not before the exit
    """) == ["True", "still here"]
