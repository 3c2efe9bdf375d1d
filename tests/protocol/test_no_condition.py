"""A store that accepts the condition of a put and ignores it, or has none: what still holds, and by what.

Mutants that these tests are there to catch: a fence check that does not read its claim; a claim put before the probe;
attempts named by number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from spot_core import Depth, FencedError, GenerationId, Retention, Run, Writer
from spot_core.errors import KeyExistsError
from spot_core.store import Capabilities, MemoryStore, Store
from spot_core.testing import SlowStore

from ._lives import WORLD, content


class Careless(MemoryStore):
    """As `CloudStore` after its probe on such a server: looks first, writes then. `between` runs in the gap."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        super().__init__(objects=objects)
        self.capabilities = Capabilities(put_if_absent=False, reopenable=False)
        self.between: Callable[[str], object] = lambda key: None

    def twin(self) -> Careless:
        return Careless(self._objects)

    def put_if_absent(self, key: str, data: bytes) -> None:
        if self.stat(key) is not None:
            raise KeyExistsError(f"{key} exists.")
        self.between(key)
        self.put(key, data)


def save(writer: Writer, step: int) -> GenerationId:
    opened = writer.begin(step)
    parts = [opened.write(rank, content(opened.id, rank)) for rank in range(WORLD)]
    return opened.seal(parts, world_size=WORLD).commit({}).id


def two_claims_at_once(store: Careless) -> tuple[Writer, Writer]:
    """Both find life 1 free, then both take it."""
    store.put("spot.json", b"")  # any claim before makes the record
    store.delete("spot.json")
    Run.open(store).claim()
    together = threading.Barrier(2)

    def claim(_: int) -> Writer:
        mine = store.twin()
        mine.between = lambda key: together.wait(30) if key == "lives/000002.json" else None
        return Run.open(mine).claim()

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(claim, range(2))
    assert one.life == two.life == 2, "the store could not keep them apart: that is what is tested"
    return one, two


def fenced(writer: Writer, step: int) -> bool:
    try:
        save(writer, step)
    except FencedError:
        return True
    return False


def test_of_two_claimants_of_one_life_exactly_one_goes_on() -> None:
    store = Careless()
    writers = two_claims_at_once(store)
    (loser,) = (writer for n, writer in enumerate(writers) if fenced(writer, 10 + n))
    with pytest.raises(FencedError, match="claimed by another process at the same moment"):
        loser.prune(Retention(keep=1))
    verified = Run.open(store).select(Depth.DIGESTS).verified
    assert verified is not None


def test_the_one_that_goes_on_is_fenced_by_a_newer_life_as_ever() -> None:
    store = Careless()
    first = Run.open(store).claim()
    save(first, 10)
    second = Run.open(store).claim()
    with pytest.raises(FencedError, match="superseded by life 2"):
        save(first, 20)
    assert save(second, 20) == GenerationId(2, 20)


def test_two_savers_of_one_life_and_step_leave_a_whole_generation() -> None:
    """Both pass the fence (the second claim comes after the first's check) and put their marker on one name."""
    store = Careless()
    run = Run.open(store)
    record = run.claim()  # life 1, to have a run record
    held = SlowStore(store, lambda verb, key: verb == "put_if_absent" and key.endswith("COMMIT.json"))
    one, two = Writer(Run.open(held), 1, record.run_id), Writer(run, 1, record.run_id)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(save, one, 10)
        assert held.reached.wait(30)

        def the_other_comes_first(key: str) -> None:
            """After the look, before the put."""
            store.between = lambda key: None
            held.release.set()
            assert pending.result(30) == GenerationId(1, 10)

        opened = two.begin(10)
        parts = [opened.write(rank, content(opened.id, rank)) for rank in range(WORLD)]
        store.between = the_other_comes_first
        opened.seal(parts, world_size=WORLD).commit({})
    verified = Run.open(store).select(Depth.DIGESTS).verified
    assert verified is not None
    assert verified.committed.id == GenerationId(1, 10)
    for rank in range(WORLD):
        names = verified.names(rank)
        assert {name: verified.read(name, rank) for name in names} == content(GenerationId(1, 10), rank)


def test_the_store_is_asked_before_anything_is_put() -> None:
    """The probe must come first: a claim that trusts the condition overwrites another's."""
    asked: list[str] = []

    class Asked(MemoryStore):
        @property
        def capabilities(self) -> Capabilities:  # type: ignore[override]
            asked.append("capabilities")
            return Capabilities(put_if_absent=True, reopenable=False)

        @capabilities.setter
        def capabilities(self, value: Capabilities) -> None:
            pass

        def put_if_absent(self, key: str, data: bytes) -> None:
            asked.append(key)
            super().put_if_absent(key, data)

    store: Store = Asked()
    Run.open(store).claim()
    assert asked[0] == "capabilities"
    assert asked[1:] == ["spot.json", "lives/000001.json"]
