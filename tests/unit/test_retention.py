from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot_core import ConfigError, GenerationId, Retention

IDS = st.lists(st.builds(GenerationId, st.integers(1, 4), st.integers(0, 60)), max_size=25)
RETENTIONS = st.builds(Retention, st.integers(1, 5), st.one_of(st.none(), st.integers(1, 30)))


def ids(*steps: int, life: int = 1) -> list[GenerationId]:
    return [GenerationId(life, step) for step in steps]


def test_keeps_the_newest_by_life_then_step() -> None:
    assert Retention(2).drops([*ids(900), *ids(5, 6, life=2)]) == ids(900)
    assert Retention(3).drops(ids(4, 1, 3, 2)) == ids(1)
    assert Retention(3).drops(ids(1, 2)) == []
    assert Retention(1).drops([]) == []


def test_keeps_the_first_at_or_after_every_so_many_steps() -> None:
    assert Retention(1, 100).drops(ids(20, 90, 100, 150, 210, 290, 390)) == ids(20, 90, 150, 290)


@given(RETENTIONS, IDS)
def test_what_is_dropped_is_old_and_there(retention: Retention, found: list[GenerationId]) -> None:
    drops = retention.drops(found)
    assert set(drops) <= set(found)
    assert drops == sorted(drops)
    newest = sorted(set(found))[-retention.keep :]
    assert not set(newest) & set(drops)


@given(RETENTIONS, IDS)
def test_dropping_twice_is_dropping_once(retention: Retention, found: list[GenerationId]) -> None:
    kept = set(found) - set(retention.drops(found))
    assert retention.drops(kept) == []


@given(st.integers(1, 5), st.integers(1, 30), IDS)
def test_what_is_long_term_stays(keep: int, every: int, found: list[GenerationId]) -> None:
    """Pruning after each commit keeps, of every bucket that was ever filled, its first generation."""
    retention = Retention(keep, every)
    kept: list[GenerationId] = []
    for gen in sorted(set(found)):
        kept.append(gen)
        dropped = set(retention.drops(kept))
        kept = [other for other in kept if other not in dropped]
    firsts: dict[int, GenerationId] = {}
    for gen in sorted(set(found)):
        if gen.step // every:
            firsts.setdefault(gen.step // every, gen)
    assert set(firsts.values()) <= set(kept)


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "3", None])
def test_keep_must_be_a_count(keep: object) -> None:
    with pytest.raises(ConfigError, match="keep at least 1"):
        Retention(keep)  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [0, -5, 2.0, True, "10"])
def test_keep_every_must_be_a_count(every: object) -> None:
    with pytest.raises(ConfigError, match="whole number from 1"):
        Retention(3, every)  # type: ignore[arg-type]
