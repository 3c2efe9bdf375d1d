from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from spot_core import ConfigError, Retention, Settings


def test_the_defaults_are_valid_and_known() -> None:
    assert dataclasses.asdict(Settings()) == {
        "interval": "auto",
        "keep": 3,
        "keep_every": None,
        "grace_s": 30.0,
        "window_s": 25.0,
        "exit_code": 143,
        "verify": "digests",
        "writer": "process",
        "on_save_error": "warn",
        "max_failed_saves": 3,
        "on_resize": "keep_global_batch",
        "allow_pickle": False,
        "sources": "auto",
        "local": None,
        "max_upload_mb_s": None,
        "writers_at_once": 0,
        "preflight": True,
        "storage_options": None,
    }
    assert Settings(keep=4, keep_every=100).retention == Retention(4, 100)
    assert Settings(grace_s=timedelta(minutes=2)).grace_s == 120.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"interval": "0s"}, "above zero"),
        ({"interval": "0 steps"}, "above zero"),
        ({"interval": "often"}, "Accepted"),
        ({"interval": 90}, "Accepted"),
        ({"keep": 0}, "at least 1"),
        ({"keep_every": 0}, "from 1"),
        ({"grace_s": 0}, "seconds above 0"),
        ({"grace_s": float("nan")}, "seconds above 0"),
        ({"local": ""}, "a folder of this machine"),
        ({"local": "s3://bucket/x"}, "a folder of this machine"),
        ({"max_upload_mb_s": 0}, "megabytes per second above 0"),
        ({"writers_at_once": -1}, "a number of ranks"),
        ({"window_s": -1}, "seconds above 0"),
        ({"window_s": "25"}, "seconds above 0"),
        ({"window_s": 40}, "at most grace_s"),
        ({"window_s": 1.0}, "kept free for leaving"),
        ({"exit_code": 0}, "success"),
        ({"exit_code": 1}, "any Python error"),
        ({"exit_code": 2}, "usage error"),
        ({"exit_code": 127}, "missing command"),
        ({"exit_code": 256}, "3 to 125"),
        ({"exit_code": -15}, "3 to 125"),
        ({"exit_code": True}, "3 to 125"),
        ({"verify": "marker"}, "'digests', 'sizes'"),
        ({"writer": "fork"}, "'process', 'thread'"),
        ({"on_save_error": "ignore"}, "'warn', 'raise'"),
        ({"on_resize": "keep"}, "'keep_global_batch', 'accept', 'refuse'"),
        ({"max_failed_saves": -1}, "from 0"),
        ({"allow_pickle": "yes"}, "True or False"),
        ({"sources": ""}, "source names"),
        ({"sources": "aws,,gcp"}, "source names"),
        ({"storage_options": "key=secret"}, "mapping"),
    ],
)
def test_bad_values_are_refused_with_what_is_accepted(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**wrong)
    (name,) = wrong
    assert name.removesuffix("_every") in str(caught.value)
    assert told in str(caught.value)


def test_the_environment_speaks_where_no_keyword_does() -> None:
    environ = {
        "SPOT_INTERVAL": "90s",
        "SPOT_KEEP": "5",
        "SPOT_KEEP_EVERY": "1000",
        "SPOT_GRACE_S": "120",
        "SPOT_WINDOW_S": "100.5",
        "SPOT_EXIT_CODE": "75",
        "SPOT_VERIFY": "sizes",
        "SPOT_WRITER": "thread",
        "SPOT_ON_SAVE_ERROR": "raise",
        "SPOT_MAX_FAILED_SAVES": "0",
        "SPOT_ALLOW_PICKLE": "true",
        "SPOT_SOURCES": "aws,file",
        "SPOT_RUN": "s3://bucket/run",
    }
    assert Settings.from_env(environ, keep=7, interval=None) == Settings(
        interval="90s",
        keep=7,
        keep_every=1000,
        grace_s=120,
        window_s=100.5,
        exit_code=75,
        verify="sizes",
        writer="thread",
        on_save_error="raise",
        max_failed_saves=0,
        allow_pickle=True,
        sources="aws,file",
    )
    assert Settings.from_env({}) == Settings()
    assert Settings.from_env({"SPOT_KEEP": " ", "SPOT_KEEP_EVERY": "none"}) == Settings()


@pytest.mark.parametrize(
    ("name", "text"),
    [("SPOT_KEEP", "three"), ("SPOT_GRACE_S", "30s"), ("SPOT_ALLOW_PICKLE", "maybe"), ("SPOT_KEEP_EVERY", "1.5")],
)
def test_unreadable_variables_are_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='{text}'"):
        Settings.from_env({name: text})


def test_unknown_keywords_are_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"Unknown setting intervall\. Settings are: interval, keep"):
        Settings.from_env({}, intervall="90s")


def test_storage_options_are_shown_nowhere() -> None:
    settings = Settings(storage_options={"secret": "hunter2-hunter2"})
    assert "hunter2" not in repr(settings)
    assert "storage_options" not in repr(settings)


def test_storage_options_have_a_variable_that_is_never_repeated() -> None:
    text = '{"key": "k", "client_kwargs": {"endpoint_url": "http://h:1"}}'
    settings = Settings.from_env({"SPOT_STORAGE_OPTIONS": text})
    assert settings.storage_options == {"key": "k", "client_kwargs": {"endpoint_url": "http://h:1"}}
    own = Settings.from_env({"SPOT_STORAGE_OPTIONS": text}, storage_options={"key": "mine"})
    assert own.storage_options == {"key": "mine"}
    for wrong in ('{"secret": "hunter2-hunter2"', '["hunter2-hunter2"]', "hunter2-hunter2"):
        with pytest.raises(ConfigError, match="SPOT_STORAGE_OPTIONS holds no JSON object") as caught:
            Settings.from_env({"SPOT_STORAGE_OPTIONS": wrong})
        assert "hunter2" not in f"{caught.value}{caught.value!r}{caught.value.__cause__!r}{caught.value.__context__!r}"
