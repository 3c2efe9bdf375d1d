from __future__ import annotations

from datetime import datetime, timezone

import pytest

from spot_core.signals import NoticeKind
from spot_core.signals.alibaba import alibaba
from spot_core.signals.ec2_like import utc, utc8
from spot_core.signals.tencent import tencent
from spot_core.testing.metadata import FakeAlibaba, FakeTencent


def test_times_are_read_in_their_zone():
    assert utc("2015-01-05T18:02:00Z") == datetime(2015, 1, 5, 18, 2, tzinfo=timezone.utc).timestamp()
    assert utc8("2018-08-18 12:05:33") == datetime(2018, 8, 18, 4, 5, 33, tzinfo=timezone.utc).timestamp()
    for parse in (utc, utc8):
        with pytest.raises(ValueError):
            parse("tomorrow")


def test_alibaba_with_its_own_token_header(clock):
    with FakeAlibaba(clock=clock) as server:
        source = alibaba(server.url, clock=clock)
        assert source.poll() == []
        assert server.requests[-1].headers["x-aliyun-ecs-metadata-token"] == "token-1"
        server.terminate(clock.now() + 300, since=clock.now() + 10)
        assert source.poll() == []
        clock.advance(10)
        (notice,) = source.poll()
        assert (notice.id, notice.kind) == ("alibaba:termination-time", NoticeKind.PREEMPTION)
        assert notice.deadline == clock.now() + 290
        server.revoke()
        assert len(source.poll()) == 1
        source.close()


def test_tencent_needs_no_token_and_counts_from_utc_plus_8(clock):
    with FakeTencent(clock=clock) as server:
        source = tencent(server.url, clock=clock)
        server.terminate(clock.now() + 120)
        (notice,) = source.poll()
        assert (notice.id, notice.deadline) == ("tencent:termination-time", clock.now() + 120)
        assert server.paths("PUT") == []
        clock.advance(300)
        assert source.poll() == []
        source.close()


@pytest.mark.parametrize("body", ["", "<html></html>"])
def test_a_value_that_is_no_time_is_a_failure_not_a_notice(clock, body):
    with FakeTencent(clock=clock) as server:
        source = tencent(server.url, clock=clock)
        server.show(server.TERMINATION_TIME, body)
        assert source.poll() == []
        assert "failing" in source.state
        source.close()
