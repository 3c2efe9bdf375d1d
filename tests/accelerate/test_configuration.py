"""`accelerate-spot config`, and the file that accelerate itself refuses and this launcher reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from typer.testing import CliRunner

from accelerate_spot.cli import app
from accelerate_spot.launch import configuration
from accelerate_spot.section import HANDOVER, Section
from spot_core.errors import ConfigError

PLAIN = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1, "mixed_precision": "no"}


@pytest.fixture(params=["cfg.yaml", "cfg.json"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path: Path = tmp_path / request.param
    path.write_text(json.dumps(PLAIN) if path.suffix == ".json" else yaml.safe_dump(PLAIN))
    return path


def config(file: Path, *flags: str, answers: str = "") -> str:
    done = CliRunner().invoke(app, ["config", "--config_file", str(file), *flags], input=answers)
    assert done.exit_code == 0, done.output
    return done.output


def test_by_flags(file: Path) -> None:
    config(file, "--run", "/data/a", "--interval", "10min", "--keep", "2")
    config(file, "--keep", "4")  # the rest stays
    rest, section = configuration.read(file)
    assert rest == PLAIN
    assert section == {"run": "/data/a", "interval": "10min", "keep": 4}


def test_by_questions(file: Path) -> None:
    config(file, answers="20\n/data/a\n\n5\n")
    _, section = configuration.read(file)
    assert section == {"run": "/data/a", "interval": "auto", "keep": 5, "grace_s": 20.0, "window_s": 20.0}


def test_storage_options_come_to_the_workers_as_they_stand(file: Path) -> None:
    options = {"key": "k", "client_kwargs": {"endpoint_url": "http://127.0.0.1:1", "region_name": "r"}}
    whole = {**PLAIN, "spot_config": {"run": "s3://bucket/a", "storage_options": options}}
    file.write_text(json.dumps(whole) if file.suffix == ".json" else yaml.safe_dump(whole))
    config(file, "--keep", "4")  # and stay when something else is changed
    _, section = configuration.read(file)
    active = Section.active(environ={HANDOVER: json.dumps(section)})
    assert active.run == "s3://bucket/a"
    assert active.settings.keep == 4
    assert active.settings.storage_options == options


def test_a_new_file(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "new.yaml"
    config(file, "--run", "/data/a")
    rest, section = configuration.read(file)
    assert section == {"run": "/data/a"}
    with configuration.for_accelerate(str(file), rest) as path:
        assert load_config_from_file(path).num_processes == 1


def test_accelerate_itself_refuses_the_file(file: Path) -> None:
    """Nobody trains without protection by mistake."""
    config(file, "--run", "/data/a")
    with pytest.raises(ValueError, match="spot_config"):
        load_config_from_file(str(file))


@pytest.mark.parametrize(
    ("flags", "says"), [(["--keep", "2"], "No run"), (["--run", "/a", "--window-s", "50"], "window_s")]
)
def test_what_does_not_go_together_is_not_written(file: Path, flags: list[str], says: str) -> None:
    before = file.read_text()
    done = CliRunner().invoke(app, ["config", "--config_file", str(file), *flags])
    assert done.exit_code == 2
    assert says in done.stderr
    assert file.read_text() == before


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for text, says in {"a: [": "cannot be parsed", "- a": "no names", "spot_config: {rum: 1}": "mean run"}.items():
        file = tmp_path / "bad.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=says):
            configuration.read(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        configuration.read(tmp_path / "none.yaml")
