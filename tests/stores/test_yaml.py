"""`storage_options` in the YAML of LightningCLI reach the store, nested as they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from spot_core import Run
from spot_core.store import open_store
from tests.lightning.test_entrypoint import CLI, YAML
from tests.stores.servers import Server


@pytest.mark.slow
def test_lightning_cli(
    server_named: Callable[[str], Server], run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, root = server_named("moto"), str(Path(__file__).parents[2])
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "SPOT_STORAGE_OPTIONS"):
        monkeypatch.delenv(variable, raising=False)
    config = yaml.safe_load(YAML.format(run=server.uri(run_name), epochs=1))
    config["trainer"]["callbacks"][0]["init_args"]["storage_options"] = dict(server.options)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "cli.py").write_text(CLI.format(root=root, out=str(tmp_path / "out.pt")))
    command = [sys.executable, str(tmp_path / "cli.py"), "fit", "--config", str(tmp_path / "config.yaml")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert str(server.options["secret"]) not in done.stdout + done.stderr
    store = open_store(server.uri(run_name), storage_options=server.options)
    committed = Run.open(store).discover().generations[0]
    assert committed.manifest.finished
    assert committed.id.step == 8
