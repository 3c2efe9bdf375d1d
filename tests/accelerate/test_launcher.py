"""`accelerate-spot launch`: real launchers, told to stop as a platform does it, with one process and with two."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from accelerate_spot.launch import command
from spot_core.launch.supervisor import Supervisor

from ._evidence import assert_continued, lives
from ._starts import SCRIPT

TREE = Path(__file__).parents[2]
EXIT_CODE = 143


def configuration(folder: Path, processes: int, **section: object) -> Path:
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if processes > 1 else "NO",
        "num_processes": processes,
        "use_cpu": True,
        "main_process_port": 0,
        "spot_config": {"interval": "3 steps", "sources": "sigterm,sigusr1", **section},
    }
    file = folder / f"cfg-{processes}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def launch(config: Path, *command: object, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SPOT_", "ACCELERATE_"))}
    environ |= {"PYTHONPATH": str(TREE), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "accelerate_spot.cli", "launch", "--config_file", str(config)]
    return subprocess.run(
        [*line, *map(str, command)], env=environ, capture_output=True, text=True, check=False, timeout=timeout
    )


def left_behind(out: Path) -> list[list[str]]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if str(out) in line:
            found.append(line)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (2, 2)])
def test_the_launcher_is_told(
    tmp_path: Path, control: Callable[..., Path], processes: int, workers: int, how: str
) -> None:
    config = configuration(tmp_path, processes, run=str(tmp_path / "run"))
    out = tmp_path / "out"
    options = ("--workers", workers, "--count", 32 * processes, "--out")
    want = control(*options[:4], processes=processes)
    told = ["--launcher", "--ranks", "0", "--signal", how, "--pause", "1"]
    for after in (3, 9):
        done = launch(config, SCRIPT, *options, out, "--after", after, *told)
        assert done.returncode == EXIT_CODE, done.stdout + done.stderr
        assert left_behind(out) == []
    done = launch(config, SCRIPT, *options, out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_continued(out, want, ranks=processes)


def test_what_the_workers_are_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's own options follow the grace, and the run is named where a clean stop is looked up."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    given: list[argparse.Namespace] = []
    monkeypatch.setattr(command.core, "supervise", lambda options, supervisor: given.append(options) or 0)
    config = configuration(tmp_path, 2, run=str(tmp_path / "run"), grace_s=77, window_s=60, exit_code=85)
    assert command.launch(["--config_file", str(config), "train.py", "--log", "x"], Supervisor()) == 0
    (options,) = given
    assert (options.grace, options.exit_code, options.run) == (77, 85, str(tmp_path / "run"))
    assert int(options.nproc_per_node) == 2
    assert options.training_script_args == ["train.py", "--log", "x"]
    assert os.environ["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.dist)])
@pytest.mark.parametrize("by", ["attach", "subclass"])
def test_without_this_launcher(tmp_path: Path, by: str, processes: int) -> None:
    """`python` and `torchrun`, with one line changed in the script; the run is named by a variable."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SPOT_", "ACCELERATE_"))}
    environ |= {"PYTHONPATH": str(TREE), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environ |= {"ACCELERATE_SPOT_INTERVAL": "3 steps", "ACCELERATE_SPOT_SOURCES": "sigterm"}
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []

    def begin(out: str, *options: object) -> int:
        (tmp_path / out).mkdir(exist_ok=True)
        script = [SCRIPT.with_name("_script_own.py"), "--out", tmp_path / out, "--by", by, "epochs"]
        run = {"ACCELERATE_SPOT_RUN": str(tmp_path / f"{out}-run")}
        line = [str(part) for part in (sys.executable, *many, *script, *options)]
        return subprocess.run(line, env=environ | run, check=False, timeout=200).returncode

    assert begin("control") == 0
    for after in (2, 1):  # of 9 updates with two processes
        assert begin("out", "--after", after) == (143 if processes == 1 else 1)  # torchrun's own for any failure
    assert begin("out") == 0
    assert_continued(tmp_path / "out", tmp_path / "control", ranks=processes)


@pytest.mark.slow
def test_codes_of_the_script_come_back(tmp_path: Path) -> None:
    config = configuration(tmp_path, 1, run=str(tmp_path / "run"))
    script = tmp_path / "script.py"
    script.write_text("import sys\nassert __name__ == '__main__'\nprint(sys.argv)\nsys.exit(int(sys.argv[1]))\n")
    done = launch(config, script, 7)
    assert done.returncode == 7, done.stderr
    done = launch(config, "--spot", "rum=/a", script, 0)
    assert done.returncode == 2
    assert "Did you mean run?" in done.stderr


@pytest.mark.slow
def test_a_killed_launcher_leaves_nobody(tmp_path: Path, control: Callable[..., Path]) -> None:
    config = configuration(tmp_path, 1, run=str(tmp_path / "run"))
    out = tmp_path / "out"
    done = launch(
        config, SCRIPT, "--out", out, "--after", 7, "--launcher", "--signal", "SIGKILL", "--pause", 5
    )
    assert done.returncode == -9
    _, alive = psutil.wait_procs(
        [process for process in psutil.process_iter() if str(out) in _line(process)], timeout=20
    )
    assert alive == []
    assert len(lives(out)[0]) == 7
    assert launch(config, SCRIPT, "--out", out).returncode == 0
    assert_continued(out, control(), lost=None)


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
