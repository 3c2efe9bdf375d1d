"""One snapshot is copied by several threads: in order to the outside, once each, and no error is lost."""

from __future__ import annotations

import threading

import pytest

from spot_core.pytorch.pieces import Piece, Pieces

WAIT = 60


def test_the_snapshot_grows_from_its_start_whoever_copies() -> None:
    """The first piece is held back on another thread: what is copied meanwhile is told of behind it, at once."""
    copied: list[int] = []
    ends: list[int] = []
    held, go = threading.Event(), threading.Event()

    def copy(number: int) -> None:
        if number == 0:
            held.set()
            assert go.wait(WAIT)
        copied.append(number)

    pieces = Pieces([Piece(lambda n=number: copy(n), 10 * (number + 1)) for number in range(4)], ends.append)
    background = threading.Thread(target=pieces.help)
    background.start()
    assert held.wait(WAIT)
    pieces.help()  # returns although the first is not copied yet
    assert copied == [1, 2, 3]
    assert ends == []
    go.set()
    pieces.finish()
    background.join(WAIT)
    assert sorted(copied) == [0, 1, 2, 3]
    assert ends == [40]


def test_alone_it_tells_of_every_end_in_order() -> None:
    ends: list[int] = []
    Pieces([Piece(lambda: None, 5), Piece(lambda: None), Piece(lambda: None, 9)], ends.append).finish()
    assert ends == [5, 9]


def test_no_pieces_are_finished_at_once() -> None:
    Pieces([], lambda end: pytest.fail(f"told of {end}")).finish()


@pytest.mark.parametrize("helped", [True, False])
def test_an_error_is_raised_where_the_copies_are_awaited_and_the_rest_is_left(helped: bool) -> None:
    copied: list[int] = []
    ends: list[int] = []

    def fail() -> None:
        raise OSError("no memory")

    all_three = [Piece(lambda: copied.append(0), 1), Piece(fail, 2), Piece(lambda: copied.append(2), 3)]
    pieces = Pieces(all_three, ends.append)
    if helped:
        pieces.help()
    with pytest.raises(OSError, match="no memory"):
        pieces.finish()
    assert copied == [0]
    assert ends == [1]


def test_an_error_elsewhere_ends_the_wait() -> None:
    held, go = threading.Event(), threading.Event()

    def fail() -> None:
        held.set()
        assert go.wait(WAIT)
        raise OSError("no memory")

    pieces = Pieces([Piece(fail, 1)], lambda end: None)
    background = threading.Thread(target=pieces.help)
    background.start()
    assert held.wait(WAIT)
    threading.Timer(0.05, go.set).start()
    with pytest.raises(OSError, match="no memory"):
        pieces.finish()
    background.join(WAIT)


def test_an_error_is_raised_once_nobody_copies_any_more() -> None:
    held, go, copied = threading.Event(), threading.Event(), list[int]()

    def copy() -> None:
        held.set()
        assert go.wait(WAIT)
        copied.append(0)

    def fail() -> None:
        threading.Timer(0.05, go.set).start()
        raise OSError("no memory")

    pieces = Pieces([Piece(copy, 1), Piece(fail, 2)], lambda end: None)
    background = threading.Thread(target=pieces.help)
    background.start()
    assert held.wait(WAIT)
    with pytest.raises(OSError, match="no memory"):
        pieces.finish()
    assert copied == [0]
    background.join(WAIT)
