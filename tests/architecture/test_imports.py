"""Who may import whom: import-linter's contracts, and what they cannot say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ._sources import ROOT, core_modules, imports, modules

CORE_MAY_IMPORT = {"botocore", "fsspec", "gcsfs", "google_crc32c", "httpx", "obstore", "psutil", "rich", "stamina"}
CORE_MAY_IMPORT |= {"typer", "xxhash"}
CONTRACTS_MAY_IMPORT = {"hypothesis", "pytest"}  # spot_core.testing: contract suites that others run with pytest
HEAVY = ("torch", "numpy", "lightning", "pytorch_lightning", "accelerate", "transformers")
FRAMEWORKS = {"lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers"}


def test_import_linter_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_core_imports_only_the_listed_third_parties() -> None:
    wrong = []
    for module in core_modules():
        allowed = CORE_MAY_IMPORT | (CONTRACTS_MAY_IMPORT if module.name.startswith("spot_core.testing") else set())
        for item in imports(module):
            own_or_standard = item.top == "spot_core" or item.top in sys.stdlib_module_names
            if not own_or_standard and item.top not in allowed:
                wrong.append(f"{module.where}:{item.line} imports {item.module}")
    assert wrong == []


def test_core_reaches_its_torch_part_only_at_use() -> None:
    wrong = [
        f"{module.where}:{item.line} imports {item.module}"
        for module in core_modules()
        for item in imports(module)
        if not item.deferred
        and (item.module.startswith("spot_core.pytorch") or (item.module == "spot_core" and "pytorch" in item.names))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "names", [["spot_core"], [module.name for module in core_modules()]], ids=["spot_core", "every module of the core"]
)
def test_core_loads_no_torch_and_no_framework(names: list[str]) -> None:
    """In a fresh interpreter: what is loaded after the import counts, not what the source says."""
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"print(*(name for name in {HEAVY!r} if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_torch_part_loads_no_trainer_framework() -> None:
    names = [module.name for module in modules("spot_core")]
    wrong = [
        f"{module.where}:{item.line} imports {item.module}"
        for module in modules("spot_core")
        for item in imports(module)
        if item.top in FRAMEWORKS
    ]
    assert names
    assert wrong == []


@pytest.mark.parametrize("package", ["lightning_spot", "accelerate_spot"])
def test_frameworks_are_imported_in_compat_only(package: str) -> None:
    wrong = [
        f"{module.where}:{item.line} imports {item.module}"
        for module in modules(package)
        if module.path.name != "_compat.py"
        for item in imports(module)
        if item.top in FRAMEWORKS
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["lightning_spot", "accelerate_spot"])
def test_adapters_use_public_names_of_the_core(package: str) -> None:
    wrong = []
    for module in modules(package):
        for item in imports(module):
            if item.top != "spot_core":
                continue
            parts = [*item.module.split("."), *item.names]
            wrong += [
                f"{module.where}:{item.line} uses {'.'.join(parts)}"
                for part in parts
                if part.startswith("_") and not part.startswith("__")
            ]
    assert wrong == []
