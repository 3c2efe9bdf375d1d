"""The versions that are tested are the ones that users may install, and the ones that are installed here."""

from __future__ import annotations

import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ._sources import ROOT


def _pins() -> dict[str, Version]:
    lines = (ROOT / "tests" / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def _requirements() -> list[Requirement]:
    found = [Requirement(line) for line in metadata.requires("lightning-spot") or []]
    return [item for item in found if canonicalize_name(item.name) != "lightning-spot"]


def test_every_pin_lies_in_the_range_that_users_get() -> None:
    pins = _pins()
    outside = [
        f"{item.name}: {pins[canonicalize_name(item.name)]} not in {item.specifier}"
        for item in _requirements()
        if canonicalize_name(item.name) in pins and pins[canonicalize_name(item.name)] not in item.specifier
    ]
    assert outside == []


def test_what_the_tests_need_is_pinned() -> None:
    needed = {
        canonicalize_name(item.name)
        for item in _requirements()
        if item.marker is None
        or any(item.marker.evaluate({"extra": extra}) for extra in ("dev", "lightning", "accelerate"))
    }
    assert sorted(needed - set(_pins())) == []


@pytest.mark.parametrize("name", ["torch", "lightning", "accelerate", "fsspec", "typer", "ckpt-chaos"])
def test_the_tested_version_is_the_installed_one(name: str) -> None:
    installed = Version(metadata.version(name))
    assert installed.public == str(_pins()[name])


@pytest.mark.parametrize("withdrawn", ["2.6.2", "2.6.3"])
def test_withdrawn_lightning_is_refused(withdrawn: str) -> None:
    specifiers = [item.specifier for item in _requirements() if item.name == "lightning"]
    assert specifiers
    assert all(Version(withdrawn) not in item for item in specifiers)
    assert all(Version("2.5.0") in item and Version("2.6.6") in item for item in specifiers)


def test_python_floor_is_the_one_that_the_tools_check() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    floor = re.search(r'requires-python = ">=(\d+)\.(\d+)"', text)
    assert floor is not None
    assert f'target-version = "py{floor[1]}{floor[2]}"' in text
    assert f'python_version = "{floor[1]}.{floor[2]}"' in text
