"""When the supervisor passes a signal on, interrupts the agent, kills or leaves: its decisions, without processes."""

from __future__ import annotations

import signal
from signal import SIGKILL, SIGTERM, SIGUSR1

import pytest

from spot_core.launch import supervisor as module
from spot_core.launch.supervisor import LEAVE_S, Supervisor
from spot_core.testing import FakeClock


class Scene:
    """A supervisor with a clock and workers made up; writes down what it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, agent_stops_workers: bool = False) -> None:
        self.clock = FakeClock()
        self.workers = [11, 12]
        self.done: list[object] = []
        self.supervisor = Supervisor(clock=self.clock)
        self.supervisor.configure(kill_after_s=30.0, agent_stops_workers=agent_stops_workers)
        monkeypatch.setattr(module, "worker_groups", lambda: self.workers)
        monkeypatch.setattr(module.os, "killpg", lambda group, signum: self.done.append((group, signum)))
        monkeypatch.setattr(module, "_raise_python_handler", lambda signum: self.done.append(("agent", signum)))
        monkeypatch.setattr(module.os, "_exit", lambda code: self.done.append(("exit", code)))

    def tell(self, signum: signal.Signals) -> list[object]:
        self.done.clear()
        self.supervisor._received(signum)
        return list(self.done)

    def wait(self) -> list[object]:
        """Let the time pass to the next thing due, and say what it was."""
        self.done.clear()
        timeout = self.supervisor._next_timeout()
        if timeout is None:
            return ["nothing due"]
        self.clock.advance(timeout)
        self.supervisor._time_is_up()
        return list(self.done)


def test_every_stop_is_passed_on_and_the_grace_runs_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    assert scene.tell(SIGTERM) == [(11, SIGTERM), (12, SIGTERM)]
    scene.clock.advance(20)
    assert scene.tell(SIGTERM) == [(11, SIGTERM), (12, SIGTERM)]
    assert scene.supervisor._next_timeout() == 10
    scene.workers.remove(11)
    assert scene.wait() == [(12, SIGKILL)]
    assert scene.wait() == ["nothing due"]


def test_a_message_starts_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    assert scene.tell(SIGUSR1) == [(11, SIGUSR1), (12, SIGUSR1)]
    assert scene.wait() == ["nothing due"]
    assert scene.supervisor.stop_signal is None


def test_with_restarts_the_agent_passes_the_first_stop_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, agent_stops_workers=True)
    assert scene.tell(SIGUSR1) == [(11, SIGUSR1), (12, SIGUSR1)]
    assert scene.tell(SIGTERM) == [("agent", SIGTERM)]
    assert scene.tell(SIGTERM) == [(11, SIGTERM), (12, SIGTERM)]


def test_without_workers_the_agent_is_interrupted_then_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.workers.clear()
    assert scene.tell(SIGUSR1) == []
    assert scene.tell(SIGTERM) == [("agent", SIGTERM)]
    assert scene.tell(SIGTERM) == []
    assert scene.supervisor._next_timeout() == LEAVE_S
    assert scene.wait() == [("exit", 1)]


def test_an_agent_that_is_about_to_report_is_left_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers stop, and while the agent collects their codes the next SIGTERM arrives."""
    scene = Scene(monkeypatch)
    scene.tell(SIGTERM)
    scene.workers.clear()
    assert scene.tell(SIGTERM) == []
    assert scene.wait() == [("agent", SIGTERM)]  # it hangs after all


def test_after_the_end_signals_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.tell(SIGTERM)
    scene.supervisor.finish()
    assert scene.tell(SIGTERM) == []
    assert scene.wait() == ["nothing due"]
