"""The fast tests of this folder with the oldest accelerate that is supported, in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

OLDEST = "1.10.0"
TREE = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_with_the_oldest_accelerate(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", f"accelerate=={OLDEST}"], check=True)
    # Everything else, torch above all, is the one of these tests.
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()
    Path(site, "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n{TREE}\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ["PYTHONPATH"] = str(TREE)
    version = subprocess.run(
        [python, "-c", "import accelerate; print(accelerate.__version__)"],
        check=True, capture_output=True, text=True, env=environ,
    )
    assert version.stdout.strip() == OLDEST
    assert sys.executable != str(python)
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/accelerate"],
        cwd=TREE, env=environ, capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
