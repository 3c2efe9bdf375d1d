"""`spot_config:`: its names, where they come from and which one counts, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from accelerate_spot.section import HANDOVER, Section
from spot_core.errors import ConfigError


def active(environ: dict[str, str], **given: Any) -> Section:
    return Section.active(environ=environ, **given)


def test_what_counts_most() -> None:
    everywhere = {
        "SPOT_RUN": "/general", "SPOT_INTERVAL": "10 steps", "SPOT_KEEP": "7", "SPOT_GRACE_S": "99",
        HANDOVER: json.dumps({"run": "/file", "interval": "20 steps", "keep": 8}),
        "ACCELERATE_SPOT_RUN": "/special", "ACCELERATE_SPOT_INTERVAL": "30 steps",
    }
    section = active(everywhere, interval="40 steps")
    assert section.run == "/special"
    assert section.settings.interval == "40 steps"
    assert section.settings.keep == 8
    assert section.settings.grace_s == 99
    assert active(everywhere).settings.interval == "30 steps"
    assert active(everywhere, run="/argument").run == "/argument"
    assert active({"SPOT_RUN": "/general"}).epoch_loop == "rewrite"
    assert active({"SPOT_RUN": "/general", HANDOVER: '{"epoch_loop": "off"}'}).epoch_loop == "off"


def test_what_is_exported_gives_the_same_settings() -> None:
    values = {"run": "/a", "interval": "5 steps", "allow_pickle": True, "keep_every": 3}
    section = active({HANDOVER: json.dumps(values)})
    environ: dict[str, str] = {}
    section.export(environ)
    assert active(environ) == section


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({HANDOVER: '{"run": "/a", "intervall": "5 steps"}'}, "unknown keys: intervall. Did you mean interval?"),
        ({HANDOVER: '{"run": "/a", "grace": 5}'}, "Did you mean grace_s?"),
        ({HANDOVER: '["run"]'}, "no mapping"),
        ({HANDOVER: "run=/a"}, "holds no JSON"),
        ({HANDOVER: '{"run": "/a", "epoch_loop": "on"}'}, "rewrite, off"),
        ({HANDOVER: '{"interval": "5 steps"}'}, "No run"),
        ({HANDOVER: '{"run": "/a", "keep": 0}'}, "keep"),
        ({"ACCELERATE_SPOT_RUN": "/a", "ACCELERATE_SPOT_KEEP": "many"}, "KEEP='many' is not a number"),
    ],
)
def test_what_is_refused(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        active(environ)
    assert says in f"{refused.value}"
