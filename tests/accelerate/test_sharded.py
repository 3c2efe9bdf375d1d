"""FSDP2: models in shards; killed, told to stop, started by another number of processes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig

from accelerate_spot.launch import command, runner
from spot_core.errors import ConfigError
from spot_core.launch.supervisor import Supervisor
from spot_core.pytorch.loader import load
from spot_core.run import Run

from ._evidence import assert_continued, assert_same, lives
from ._starts import SCRIPT, start
from .test_launcher import launch

pytestmark = pytest.mark.dist

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
"""What accelerate's launcher makes of `fsdp_config`."""
OWN = SCRIPT.with_name("_script_sharded.py")


def go(out: Path, run: Path, *options: Any, processes: int = 2, **keyword: Any) -> list[int]:
    """The script that knows nothing of the run."""
    return start(
        out, "--sharded", "--count", 48, *options, run=run, processes=processes, environment=FSDP, **keyword
    )


@pytest.mark.slow
def test_an_unchanged_script(tmp_path: Path) -> None:
    """Killed in epoch 0; told in the evaluation after it, and at the end of the next (one rank is told); the rest."""
    control, out, run = tmp_path / "control", tmp_path / "out", tmp_path / "run"
    assert go(control, tmp_path / "control-run") == [0, 0]
    assert go(out, run, "--after", 5, interval="2 steps") == [-9, -9]
    assert go(out, run, "--after", 1, "--signal", "SIGTERM", "--ranks", "1", "--in-evaluation") == [143, 143]
    assert go(out, run, "--after", 6, "--signal", "SIGTERM", "--ranks", "0") == [143, 143]
    assert go(out, run) == [0, 0]
    assert_continued(out, control, ranks=2, lost=None)
    final = torch.load(out / "final-rank1.pt", weights_only=True)
    assert final["model"]["0.weight"].shape == (4, 4), "half of it"


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    """Told where gradients of the second optimizer wait: they are shards too, as averaged weights are."""
    out, run = tmp_path / "out", tmp_path / "run"
    assert start(out, "--after", 2, run=run, processes=2, script=OWN) == [143, 143]
    saved = newest(run)
    assert [list(gradients) for gradients in saved["gradients"]] == [["2.weight", "2.bias"]]
    assert saved["registered"][0]["updates"] == len(lives(out)[0])
    assert start(out, "--after", 1, run=run, processes=2, script=OWN) == [143, 143]
    assert_same(begun(out, 1), relevant(saved), "loaded")


@pytest.mark.slow
def test_a_script_that_says_so_itself(tmp_path: Path) -> None:
    control, out, run = tmp_path / "control", tmp_path / "out", tmp_path / "run"
    assert start(control, run=tmp_path / "control-run", processes=2, script=OWN) == [0, 0]
    for after in (3, 6):
        assert start(out, "--after", after, run=run, processes=2, script=OWN) == [143, 143]
    assert start(out, "--after", 4, "--kill", run=run, processes=2, script=OWN, interval="1 steps") == [-9, -9]
    assert start(out, run=run, processes=2, script=OWN) == [0, 0]
    assert_continued(out, control, ranks=2, lost=None)


@pytest.mark.slow
def test_another_number_of_processes(tmp_path: Path) -> None:
    """Two, four, two: shards are those that were saved, each update has the samples it would have had."""
    control, out, run = tmp_path / "control", tmp_path / "out", tmp_path / "run"
    options: tuple[Any, ...] = ("--accumulate", 2, "--seldom", 1)
    assert start(control, *options, run=tmp_path / "control-run", processes=2, script=OWN) == [0, 0]
    assert start(out, *options, "--after", 3, run=run, processes=2, script=OWN) == [143, 143]
    saved = newest(run)
    assert start(out, *options, "--after", 2, run=run, processes=4, script=OWN) == [143] * 4
    assert_same(begun(out, 1), relevant(saved), "loaded by four")
    saved = newest(run)
    assert start(out, *options, run=run, processes=2, script=OWN) == [0, 0]
    assert_same(begun(out, 2), relevant(saved), "loaded by two")
    assert updates(out) == updates(control)
    got, want = (end(folder, run) for folder, run in ((out, run), (control, tmp_path / "control-run")))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_shards_in_two_groups_of_processes(tmp_path: Path) -> None:
    """HSDP, two by two: killed and told, the same; then two processes without groups. (Shards that both groups had
    written would not load.)"""
    control, out, run = tmp_path / "control", tmp_path / "out", tmp_path / "run"
    options: tuple[Any, ...] = ("--replicate", 2)
    assert start(control, *options, run=tmp_path / "control-run", processes=4, script=OWN) == [0] * 4
    assert start(out, *options, "--after", 2, run=run, processes=4, script=OWN) == [143] * 4
    saved = newest(run)
    killed = start(out, *options, "--after", 3, "--kill", run=run, processes=4, script=OWN, interval="1 steps")
    assert killed == [-9] * 4
    assert_same(begun(out, 1), relevant(saved), "loaded")
    assert start(out, *options, "--after", 3, run=run, processes=4, script=OWN) == [143] * 4
    left, saved = tmp_path / "left", newest(run)
    shutil.copytree(run, left)
    assert start(out, *options, run=run, processes=4, script=OWN) == [0] * 4
    assert_continued(out, control, ranks=4, lost=None)
    assert start(tmp_path / "two", "--accumulate", 2, "--after", 1, run=left, processes=2, script=OWN) == [143] * 2
    assert_same(begun(tmp_path / "two", 0), relevant(saved), "loaded by two")


@pytest.mark.slow
def test_under_the_launcher(tmp_path: Path) -> None:
    """What `accelerate config` writes for FSDP2, with the section of the run in it."""
    control, out, run = tmp_path / "control", tmp_path / "out", tmp_path / "run"
    assert go(control, tmp_path / "control-run") == [0, 0]
    config = written_by_accelerate(tmp_path / "fsdp.yaml", run, version=2)
    options = ("--sharded", "--count", 48, "--out", out)
    told = ("--launcher", "--ranks", "0", "--signal", "SIGTERM", "--pause", 1)
    for after in (3, 6):
        done = launch(config, SCRIPT, *options, "--after", after, *told)
        assert done.returncode == 143, done.stdout + done.stderr
    done = launch(config, SCRIPT, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_continued(out, control, ranks=2)


@pytest.mark.parametrize("version", [1, 2])
def test_what_the_launcher_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(command.core, "supervise", lambda options, supervisor: 0)
    config = written_by_accelerate(tmp_path / "fsdp.yaml", tmp_path / "run", version=version)
    line = ["--config_file", str(config), "train.py"]
    if version == 1:
        with pytest.raises(ConfigError, match="version 1 of FSDP"):
            command.launch(line, Supervisor())
        return
    assert command.launch(line, Supervisor()) == 0
    assert (os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_VERSION"]) == ("true", "2")
    assert runner.DROPPED not in os.environ


def written_by_accelerate(path: Path, run: Path, *, version: int) -> Path:
    section = {"run": str(run), "interval": "3 steps", "sources": "sigterm,sigusr1"}
    config = ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="FSDP",
        mixed_precision="no",
        use_cpu=False,
        debug=False,
        num_processes=2,
        main_process_port=0,
        fsdp_config={
            "fsdp_version": version,
            "fsdp_reshard_after_forward": True if version == 2 else "FULL_SHARD",
            "fsdp_offload_params": False,
            "fsdp_auto_wrap_policy": "NO_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,  # which fails with buffers, in accelerate itself
            "fsdp_activation_checkpointing": False,
        },
    )
    config.to_yaml_file(str(path))
    path.write_text(path.read_text() + yaml.safe_dump({"spot_config": section}))
    return path


@pytest.mark.slow
def test_what_was_whole_is_not_taken_for_shards(tmp_path: Path) -> None:
    out, run = tmp_path / "out", tmp_path / "run"
    assert start(out, "--count", 48, "--after", 3, "--signal", "SIGTERM", run=run, processes=2) == [143, 143]
    with pytest.raises(AssertionError, match="whole on every process, and it is sharded now"):
        go(out, run)


def newest(run: Path) -> Any:
    """What the newest generation holds, as a plain reader sees it."""
    opened = Run.open(run)
    return load(opened.store, opened.verify(opened.discover().generations[0]), rank=0, world=1).shared


def relevant(saved: Any) -> Any:
    """What `begun` shows of a generation."""
    often, seldom = (optimizer["state"] for optimizer in saved["optimizers"])
    return {
        "model": dict(saved["models"][0]),
        "averaged": saved["registered"][0]["values"],
        "often": {name: often[name] for name in sorted(often)},
        "seldom": {name: seldom[name] for name in sorted(seldom)},
    }


def begun(out: Path, life: int) -> Any:
    """What the start of this number had before its first batch."""
    return torch.load(out / f"begun-{life}.pt", weights_only=True)


def updates(out: Path) -> dict[int, tuple[int, float, list[float]]]:
    """Epoch, learning rate and samples of all ranks by update."""
    found: dict[int, tuple[int, float, list[float]]] = {}
    for path in out.glob("rank*.jsonl"):
        for rows in lives(out, int(path.stem.removeprefix("rank"))):
            for epoch, _, ids, _, rate, update in rows:
                known = found.setdefault(update, (epoch, rate, []))
                assert known[:2] == (epoch, rate)
                known[2].extend(ids)
    return {update: (*rest, sorted(ids)) for update, (*rest, ids) in found.items()}


def end(out: Path, run: Path) -> dict[str, torch.Tensor]:
    saved = newest(run)
    return {**saved["models"][0], **{f"averaged.{i}": v for i, v in enumerate(saved["registered"][0]["values"])}}
