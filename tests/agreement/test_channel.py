"""The channel between ranks: waiting that names who is missing, first writer wins, keys that do not collide."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from spot_core.errors import ConfigError, FencedError, SaveError
from spot_core.pytorch.channel import Channel, ChannelError, ChannelTimeout
from spot_core.pytorch.hosted import _join
from spot_core.pytorch.joint import Joint
from spot_core.pytorch.pulse import Pulse
from spot_core.pytorch.ranks import Ranks


@pytest.fixture
def pair() -> tuple[Channel, Channel]:
    store = dist.HashStore()
    return Channel(store, rank=0, world_size=2), Channel(store, rank=1, world_size=2)


def joint_of(channel: Channel, silent_s: float = 30) -> Joint:
    return Joint(channel, timeout_s=5, pulse=Pulse(channel, silent_s=silent_s))


def test_a_timeout_names_the_ranks_that_are_missing(pair: tuple[Channel, Channel]) -> None:
    pair[0].set("save/3/0", "a")
    with pytest.raises(ChannelTimeout, match=r"no word from rank 1, 12 within 0\.1 s") as caught:
        pair[0].wait(["save/3/0", "save/3/1", "save/3/12"], 0.1)
    assert caught.value.ranks == (1, 12)
    assert caught.value.keys == ("save/3/1", "save/3/12")


def test_wait_gives_the_values_in_order_as_they_come(pair: tuple[Channel, Channel]) -> None:
    timer = threading.Timer(0.05, lambda: pair[1].set("x/1", "one"))
    timer.start()
    pair[0].set("x/0", "zero")
    assert pair[0].wait(["x/0", "x/1"], 10) == ["zero", "one"]


def test_a_wait_can_be_called_off(pair: tuple[Channel, Channel]) -> None:
    cancel = threading.Event()
    threading.Timer(0.05, cancel.set).start()
    with pytest.raises(ChannelTimeout):
        pair[0].wait(["x/1"], 1000, cancel=cancel)


def test_the_first_writer_wins_on_every_rank(pair: tuple[Channel, Channel]) -> None:
    assert pair[0].set_if_absent("verdict", "go") == "go"
    assert pair[1].set_if_absent("verdict", "abort") == "go"
    pair[0].delete(["verdict"])
    assert not pair[1].has("verdict")


def test_one_rank_has_a_store_of_its_own() -> None:
    one, other = (Channel.open(Ranks(0, 1, None)) for _ in range(2))
    one.set("k", "v")
    assert one.clone().get("k") == "v"
    assert not other.has("k")


def test_several_ranks_need_a_process_group() -> None:
    with pytest.raises(ConfigError, match="gloo group"):
        Channel.open(Ranks(0, 2, None))


def test_a_store_whose_host_is_gone_is_an_error_of_ours() -> None:
    server = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    client = Channel(dist.TCPStore("127.0.0.1", server.port, 1, False), rank=0, world_size=2)
    client.set("k", "v")
    del server
    with pytest.raises(ChannelError):
        _call_until_noticed(client)


def _call_until_noticed(client: Channel) -> None:
    for _ in range(10):
        client.get("k")


def test_words_of_rank_0_reach_the_others_and_so_do_its_errors(pair: tuple[Channel, Channel]) -> None:
    first, second = (joint_of(channel) for channel in pair)
    assert first.tell(lambda: {"n": 1}) == {"n": 1}
    assert second.tell(dict) == {"n": 1}

    def fenced() -> dict[str, object]:
        raise FencedError("superseded", hint="stop")

    for joint in (first, second):
        with pytest.raises(FencedError, match="superseded") as caught:
            joint.tell(fenced)
        assert caught.value.hint == "stop"
    first.forget()
    assert first.tell(lambda: {"n": 2}) == second.tell(dict) == {"n": 2}
    with pytest.raises(ChannelTimeout, match="rank 0"):
        second.tell(dict, timeout_s=0.05)


def test_an_unforeseen_error_on_rank_0_does_not_leave_the_others_waiting(pair: tuple[Channel, Channel]) -> None:
    first, second = (joint_of(channel) for channel in pair)

    def broken() -> dict[str, object]:
        raise ZeroDivisionError("by zero")

    for joint in (first, second):
        with pytest.raises(Exception, match="ZeroDivisionError: by zero") as caught:
            joint.tell(broken)
        assert not isinstance(caught.value, SaveError)


def test_rank_0_stays_until_its_last_word_was_heard(pair: tuple[Channel, Channel]) -> None:
    first, second = (joint_of(channel) for channel in pair)
    first.tell(lambda: {"n": 1})
    settled = threading.Event()
    thread = threading.Thread(target=lambda: (first.settle(30), settled.set()))
    thread.start()
    assert second.tell(dict) == {"n": 1}
    assert not settled.wait(0.1)
    second.settle(30)
    assert settled.wait(30)
    thread.join()


def test_rank_0_does_not_stay_for_ever(pair: tuple[Channel, Channel], caplog: pytest.LogCaptureFixture) -> None:
    first = joint_of(pair[0])
    first.tell(lambda: {"n": 1})
    first.settle(0.05)
    assert "no word from rank 1" in caplog.messages[0]


def test_a_rank_0_that_is_slow_is_waited_for_and_a_silent_one_is_not(pair: tuple[Channel, Channel]) -> None:
    pulse = Pulse(pair[0], silent_s=0.5)
    pulse.start()
    with pytest.raises(ChannelTimeout, match=r"rank 0 within 2\.2 s"):
        joint_of(pair[1], silent_s=0.5).tell(dict, timeout_s=2.2)
    pulse.close()
    with pytest.raises(ChannelError, match=r"rank 0 has given no sign of life .* while rank 1 waited") as caught:
        joint_of(pair[1], silent_s=0.5).tell(dict)
    assert not isinstance(caught.value, ChannelTimeout)


def test_a_rank_that_reaches_no_address_of_rank_0_says_which_were_tried() -> None:
    server = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    port = server.port
    assert _join("no.such.host.invalid", ["127.0.0.1"], port, 3).port == port
    del server
    with pytest.raises(ConfigError, match=rf"rank 3 does not reach .* port {port} of no\.such\.host.*127\.0\.0\.1 \("):
        _join("no.such.host.invalid", ["127.0.0.1"], port, 3)
