"""The import hook: an accelerator is attached whoever imported what first, and left alone where that is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

IMPORTS = "import accelerate, transformers.trainer"
CHECK = """
activation.install()
activation.install()
first = accelerate.Accelerator(cpu=True)
with activation.left_alone():
    assert accelerate.Accelerator().made == ((), {})
third = accelerate.Accelerator(1)
assert attached == [first, third] and third.made == ((1,), {}), attached
assert [each.__name__ for each in patched] == ["transformers.trainer"], patched
"""
BEFORE = """
import sys, types
from accelerate_spot import activation
attached, patched = [], []
attaching = types.ModuleType("accelerate_spot.attaching")
attaching.attach = attached.append
trainer = types.ModuleType("accelerate_spot.trainer")
trainer.__spec__ = types.SimpleNamespace(name="accelerate_spot.trainer")
trainer.patch = patched.append
sys.modules.update({each.__name__: each for each in (attaching, trainer)})
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """The shape of the two packages; the real ones take ten seconds to import, and other tests use them."""
    for name, text in {
        "accelerate/__init__.py": "from .accelerator import Accelerator",
        "accelerate/accelerator.py": (
            "class Accelerator:\n    def __init__(self, *args, **kwargs):\n        self.made = (args, kwargs)"
        ),
        "transformers/__init__.py": "",
        "transformers/trainer.py": "",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "order", [f"{IMPORTS}\nactivation.install()", f"activation.install()\n{IMPORTS}"], ids=["hook last", "hook first"]
)
def test_accelerators_are_attached_but_those_left_alone(packages: Path, order: str) -> None:
    script = "\n".join([f"import sys; sys.path.insert(0, {str(packages)!r})", BEFORE, order, CHECK])
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
