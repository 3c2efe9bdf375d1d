"""accelerate's configuration file with the `spot_config:` section in it: read apart, and written."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from accelerate_spot.section import KEY, checked
from spot_core.errors import ConfigError


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(accelerate's part, the section) of a file. Raises ConfigError."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The configuration {path} cannot be read: {error.strerror}.") from error
    try:
        content = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"The configuration {path} cannot be parsed: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"The configuration {path} holds no names and values.")
    rest = {str(key): value for key, value in content.items() if key != KEY}
    return rest, checked(content[KEY], str(path)) if KEY in content else {}


@contextmanager
def for_accelerate(path: str, rest: Mapping[str, Any]) -> Iterator[str]:
    """A file that accelerate reads: the configuration without the section, which it would refuse."""
    with tempfile.TemporaryDirectory(prefix="accelerate-spot-") as folder:
        file = Path(folder) / Path(path).name
        file.write_text(_text(file, rest), encoding="utf-8")
        yield str(file)


def write(path: Path, rest: Mapping[str, Any], section: Mapping[str, Any]) -> None:
    """Put both into `path`, as YAML or JSON by its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(path, {**rest, KEY: dict(section)}), encoding="utf-8")


def _text(path: Path, content: Mapping[str, Any]) -> str:
    if path.suffix == ".json":
        return json.dumps(content, indent=2) + "\n"
    return yaml.safe_dump(dict(content), sort_keys=False)
