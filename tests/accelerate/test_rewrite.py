"""Which epoch loops are recognised in a script, and what becomes of them."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from accelerate_spot.launch.rewrite import EPOCHS, LEFT, NUMBERED, rewrite


def run(source: str) -> list[Any]:
    """What happens when the rewritten script runs: its own marks, and the calls that were put in."""
    events: list[Any] = []
    tree, _ = rewrite(textwrap.dedent(source), "script.py")

    def epochs(items: Any) -> Any:
        for item in items:
            events.append(("epoch", item))
            yield item
        events.append("all epochs")

    names = {
        EPOCHS: epochs,
        LEFT: lambda: events.append("left"),
        NUMBERED: lambda items, start=0: enumerate(items, start + 100),
        "mark": events.append,
    }
    exec(compile(tree, "script.py", "exec"), names)
    return events


LOOP = """
    def main():
        for epoch in range(2):
            for step, batch in enumerate("a"):
                mark((step, batch))
        mark("after")
    main()
"""


def test_the_loop_and_its_numbering() -> None:
    assert run(LOOP) == [("epoch", 0), (100, "a"), ("epoch", 1), (100, "a"), "all epochs", "left", "after"]


def test_a_loop_that_is_left_early_is_over_too() -> None:
    events = run(
        """
        for epoch in range(1, 5):
            for batch in "ab":
                break
            if epoch == 2:
                break
        mark("after")
        """
    )
    assert events == [("epoch", 1), ("epoch", 2), "left", "after"]


def test_an_error_in_the_loop_is_no_end_of_it() -> None:
    with pytest.raises(ZeroDivisionError):
        run("for epoch in range(2):\n    for batch in 'a':\n        1 / 0")


@pytest.mark.parametrize(
    ("loop", "known"),
    [
        ("for epoch in range(3):\n    for b in c: pass", True),
        ("for num_epoch in range(first, last):\n    for b in c: pass", True),
        ("for epoch in range(3):\n    with x:\n        for b in c: pass", True),
        ("for epoch in range(3):\n    train()", False),
        ("for fold in range(3):\n    for b in c: pass", False),
        ("for epoch in epochs(3):\n    for b in c: pass", False),
        ("for b in c: pass", False),
    ],
)
def test_which_loops_are_recognised(loop: str, known: bool) -> None:
    _, lines = rewrite(loop, "script.py")
    assert lines == ([1] if known else [])


def test_a_line_in_a_traceback_is_the_scripts_own() -> None:
    tree, lines = rewrite("\n\nfor epoch in range(1):\n    for b in 'a':\n        raise ValueError\n", "script.py")
    assert lines == [3]
    with pytest.raises(ValueError) as error:
        exec(compile(tree, "script.py", "exec"), {EPOCHS: lambda items: items, LEFT: lambda: None})
    assert error.traceback[-1].lineno == 4
