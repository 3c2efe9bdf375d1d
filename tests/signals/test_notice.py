from __future__ import annotations

import pytest

from spot_core.signals import Notice, NoticeKind


def test_which_kinds_stop():
    assert [kind.value for kind in NoticeKind if Notice("a", kind, "s").stops] == [
        "preemption",
        "maintenance",
        "time_limit",
    ]


def test_remaining_counts_down_and_below_zero():
    notice = Notice("a", NoticeKind.PREEMPTION, "s", 100.0)
    assert notice.remaining_s(70.0) == 30.0
    assert notice.remaining_s(101.0) == -1.0
    assert Notice("a", NoticeKind.ADVISORY, "s").remaining_s(70.0) is None


def test_a_cancellation_keeps_id_and_source():
    taken_back = Notice("a", NoticeKind.MAINTENANCE, "azure", 5.0, "x").cancelled("gone")
    assert taken_back == Notice("a", NoticeKind.CANCELLED, "azure", None, "gone")


@pytest.mark.parametrize("deadline", [None, 12.5])
def test_json_and_back(deadline):
    notice = Notice("a", NoticeKind.TIME_LIMIT, "slurm", deadline, "why")
    assert Notice.from_json(notice.to_json()) == notice


@pytest.mark.parametrize("value", [{}, {"id": "a", "kind": "fire", "source": "s"}, {"id": "a", "kind": "advisory"}, []])
def test_other_json_is_refused(value):
    with pytest.raises(ValueError):
        Notice.from_json(value)
