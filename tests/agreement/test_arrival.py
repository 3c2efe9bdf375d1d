"""Ranks that come to a start: the words of an earlier start, in a store that outlived it, count for nothing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from spot_core.pytorch.arrival import _answer, _call
from spot_core.pytorch.asking import Asking, Unanswered
from spot_core.pytorch.channel import Channel


def test_a_call_is_answered_by_this_start_only() -> None:
    store = dist.HashStore()
    first, second = (Channel(store, rank=rank, world_size=2) for rank in range(2))
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            answered = pool.submit(_answer, second, 30)
            call = _call(first, 30)
            assert answered.result(30) == call
            assert call[1] == ""
    assert _answer(second, 0.2) == ("", "0"), "the word of the start before"
    assert _call(first, 0.2)[1] == "1", "the answer of the start before"


def test_a_request_without_an_answer_ends_and_so_do_those_after_it() -> None:
    answers = threading.Event()
    asking = Asking(0.1)
    assert asking.ask(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        asking.ask(lambda: 1 / 0)
    with pytest.raises(Unanswered, match="no answer within"):
        asking.ask(answers.wait)
    with pytest.raises(Unanswered, match="has not answered since"):
        asking.ask(lambda: 3)
    answers.set()
    assert asking._late is not None
    asking._late.result(30)
    assert asking.ask(lambda: 4) == 4
