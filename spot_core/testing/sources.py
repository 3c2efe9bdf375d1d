"""The contract of a notice source, to be run by whoever writes one.

class TestMine(SourceContract):
    def make(self): return MySource(self.server.url)
    def announce(self): self.server.preempt()
    def break_service(self): self.server.fail(503, times=1000)
    def repair_service(self): self.server.heal()
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from spot_core.signals.base import Source
from spot_core.signals.notice import Notice


class SourceContract(ABC):
    """Tests for pytest. A subclass sets the stage (``setup_method`` or fixtures) and says how to make things happen."""

    @abstractmethod
    def make(self) -> Source:
        """A source on a platform that announces nothing, quick enough for tests."""

    @abstractmethod
    def announce(self) -> None:
        """The platform announces that the machine will be taken."""

    def break_service(self) -> bool | None:
        """What the source asks stops answering. Return False where that cannot happen."""
        return False

    def repair_service(self) -> None:
        """It answers again. Needed only where `break_service` breaks something."""
        raise NotImplementedError

    def test_a_quiet_platform_gives_no_notice(self) -> None:
        source = self._opened()
        assert source.poll() == []
        assert source.poll() == []
        source.close()

    def test_it_names_itself_and_its_state_in_one_line(self) -> None:
        source = self._opened()
        assert source.name
        assert source.name == source.name.lower()
        source.poll()
        assert source.state
        assert "\n" not in source.state
        assert source.interval_s >= 0
        source.close()

    def test_an_announcement_is_a_stopping_notice_that_keeps_its_id(self) -> None:
        source = self._opened()
        source.poll()
        self.announce()
        first = self._stopping(source)
        assert first.source
        assert first.deadline is None or first.deadline > 0
        again = [notice for notice in source.poll() if notice.stops]
        assert {notice.id for notice in again} <= {first.id}
        assert all(notice.deadline == first.deadline for notice in again)
        source.close()

    def test_an_announcement_from_before_the_start_is_seen(self) -> None:
        source = self._opened()
        self.announce()
        assert self._stopping(source).stops
        source.close()

    def test_a_failing_service_neither_raises_nor_ends_the_source(self) -> None:
        source = self._opened()
        if self.break_service() is False:
            source.close()
            return
        healthy_s = source.interval_s
        pauses = []
        for _ in range(4):
            assert source.poll() == []
            assert source.state.startswith("failing")
            pauses.append(source.interval_s)
        assert pauses == sorted(pauses)
        assert pauses[-1] > healthy_s
        self.repair_service()
        assert source.poll() == []
        assert not source.state.startswith("failing")
        self.announce()
        assert self._stopping(source).stops
        source.close()

    def test_closing_twice_is_once_and_silent_afterwards(self) -> None:
        source = self._opened()
        source.close()
        source.close()
        self.announce()
        assert source.poll() == []

    def _opened(self) -> Source:
        source = self.make()
        assert source.open()
        return source

    def _stopping(self, source: Source) -> Notice:
        # A source that waits for bytes or changes may need a second look.
        for _ in range(3):
            found = [notice for notice in source.poll() if notice.stops]
            if found:
                return found[0]
        raise AssertionError(f"{source.name} did not see the announcement; its state: {source.state}")
