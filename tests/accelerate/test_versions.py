"""This folder's tests with other versions of accelerate, each in an environment of its own.

The oldest that is supported goes through all fast tests of the folder, those between it and the installed one through
the private names and the interrupted trainings.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

OLDEST = "1.10.0"
BETWEEN = ("1.11.0", "1.12.0", "1.13.0", "1.14.0")
TREE = Path(__file__).parents[2]


def with_version(folder: Path, version: str, *tests: str) -> None:
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", f"accelerate=={version}"], check=True)
    # Everything else, torch above all, is the one of these tests.
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()
    Path(site, "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n{TREE}\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ["PYTHONPATH"] = str(TREE)
    found = subprocess.run(
        [python, "-c", "import accelerate; print(accelerate.__version__)"],
        check=True, capture_output=True, text=True, env=environ,
    )
    assert found.stdout.strip() == version
    assert sys.executable != str(python)
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests],
        cwd=TREE, env=environ, capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_with_the_oldest_accelerate(tmp_path: Path) -> None:
    with_version(tmp_path / "venv", OLDEST, "tests/accelerate")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", BETWEEN)
def test_with_those_between(tmp_path: Path, version: str) -> None:
    tests = ("test_compat.py", "test_continues.py")
    with_version(tmp_path / "venv", version, *(f"tests/accelerate/{name}" for name in tests))
