"""The error tree is public: handlers match on it."""

from __future__ import annotations

import pickle

import pytest

from spot_core import errors
from spot_core.errors import Reason, SpotError

TREE = {
    "ConfigError": ("SpotError", "ValueError"),
    "StoreError": ("SpotError", "OSError"),
    "TransientStoreError": ("StoreError",),
    "AccessError": ("StoreError",),
    "KeyExistsError": ("StoreError",),
    "KeyMissingError": ("StoreError",),
    "CommitError": ("SpotError",),
    "FencedError": ("CommitError",),
    "DeadlineError": ("CommitError",),
    "SaveError": ("CommitError",),
    "RestoreError": ("SpotError",),
    "NoGenerationError": ("RestoreError", "LookupError"),
    "TornGenerationError": ("RestoreError",),
    "CorruptShardError": ("RestoreError",),
    "FormatError": ("RestoreError",),
    "TopologyError": ("RestoreError",),
    "ResumeMismatchError": ("SpotError",),
}
CLASSES = [getattr(errors, name) for name in errors.__all__ if name != "Reason"]


def test_the_tree() -> None:
    found = {cls.__name__: tuple(base.__name__ for base in cls.__bases__) for cls in CLASSES if cls is not SpotError}
    assert found == TREE


def test_reasons_are_only_ever_added() -> None:
    known = (
        "unspecified config not_a_run foreign_run store transient access no_space truncated capability key_exists "
        "key_missing commit unknown_outcome fenced pruned deadline save missing_ranks step_order restore no_generation "
        "all_damaged torn corrupt format topology mismatch"
    )
    assert set(known.split()) <= {reason.value for reason in Reason}


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_travels_between_processes_whole(cls: type[SpotError]) -> None:
    error = cls("what and where", reason=Reason.NO_SPACE, hint="what to do")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert (back.message, back.reason, back.hint) == ("what and where", Reason.NO_SPACE, "what to do")
    assert str(back) == "what and where what to do"


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_has_a_reason_of_its_own(cls: type[SpotError]) -> None:
    assert cls("x").reason is cls.default_reason
    assert str(cls("x")) == "x"
    assert [other for other in CLASSES if other.default_reason is cls.default_reason] == [cls]
