from __future__ import annotations

import os

import pytest

from spot_core.signals import FlagFile, Notice, NoticeKind, write_flag


@pytest.fixture
def path(tmp_path):
    return tmp_path / "flag"


@pytest.fixture
def source(path, clock):
    source = FlagFile(path, grace_s=20, clock=clock)
    source.open()
    return source


def test_a_bare_file_is_a_preemption_with_the_grace_from_its_first_sight(source, path, clock):
    path.touch()
    (notice,) = source.poll()
    assert (notice.kind, notice.source, notice.deadline) == (NoticeKind.PREEMPTION, "file", clock.now() + 20)
    clock.advance(5)
    assert source.poll() == [notice]


@pytest.mark.parametrize("kind", [NoticeKind.ADVISORY, NoticeKind.PREEMPTION])
def test_a_notice_in_the_file_is_passed_on_as_it_is(source, path, kind):
    notice = Notice("aws:spot-interruption", kind, "aws", 1_700_000_111.5, "spot terminate")
    write_flag(path, notice)
    assert source.poll() == [notice]
    assert [p.name for p in path.parent.iterdir()] == ["flag"]


def test_removing_the_file_takes_the_notice_back(source, path):
    path.touch()
    (notice,) = source.poll()
    path.unlink()
    assert [(n.id, n.kind) for n in source.poll()] == [(notice.id, NoticeKind.CANCELLED)]
    assert source.poll() == []


def test_a_new_notice_in_the_file_replaces_the_old_one(source, path):
    write_flag(path, Notice("a", NoticeKind.PREEMPTION, "x", 5.0))
    source.poll()
    write_flag(path, Notice("a", NoticeKind.PREEMPTION, "x", 4.0))
    assert [(n.id, n.deadline) for n in source.poll()] == [("a", 4.0)]
    write_flag(path, Notice("b", NoticeKind.PREEMPTION, "x", 3.0))
    assert [(n.id, n.kind.value) for n in source.poll()] == [("a", "cancelled"), ("b", "preemption")]


def test_a_file_left_by_an_earlier_life_does_not_stop_this_one(path, clock, caplog):
    path.touch()
    source = FlagFile(path, clock=clock)
    source.open()
    assert source.poll() == []
    assert "remove it, or touch it" in caplog.text
    os.utime(path, ns=(1, 1))
    assert len(source.poll()) == 1


def test_a_file_from_before_with_a_deadline_to_come_counts(path, clock):
    write_flag(path, Notice("a", NoticeKind.PREEMPTION, "aws", clock.now() + 60))
    write_late = FlagFile(path, clock=clock)
    write_late.open()
    assert [n.id for n in write_late.poll()] == ["a"]
    clock.advance(61)
    later = FlagFile(path, clock=clock)
    later.open()
    assert later.poll() == []


def test_a_half_written_file_gets_a_second_look_and_then_counts_as_bare(source, path, clock):
    path.write_text('{"id": "a", "ki')
    assert source.poll() == []
    assert source.state.startswith("failing")
    assert [n.kind for n in source.poll()] == [NoticeKind.PREEMPTION]


def test_a_file_finished_by_the_second_look_is_read(source, path):
    path.write_text('{"id": "a", "ki')
    source.poll()
    path.write_text('{"id": "a", "kind": "advisory", "source": "me"}\n')
    assert [(n.id, n.kind) for n in source.poll()] == [("a", NoticeKind.ADVISORY)]
