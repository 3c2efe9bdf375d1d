"""What runs inside the Slurm job. The tests know a workload by this class only, so that any trainer can take its place:
it trains `steps` steps, may be stopped at any of them, and says whether it ended as an uninterrupted run does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from . import train

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lightning_gpt"
sys.path.insert(0, str(EXAMPLE))


@dataclass(frozen=True)
class Plan:
    """`steps` steps on `nodes` nodes of `ranks` ranks each, all below `folder`, the run in `folder/run`."""

    folder: Path
    nodes: int
    ranks: int
    steps: int

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def world(self) -> int:
        return self.nodes * self.ranks


class Workload(Protocol):
    name: str
    script: Path

    def arguments(self, plan: Plan, step_s: float) -> list[str]:
        """Of the script; `step_s` is how long a step takes at least."""

    def starts(self, plan: Plan) -> list[dict[str, int]]:
        """{"life", "step"} of every start that has begun to train, oldest first."""

    def check(self, plan: Plan) -> None:
        """Assert that the end is the uninterrupted run's end, bit for bit."""


class Counting:
    """Counts over gloo and saves through the protocol: what Slurm does shows without a trainer in between."""

    name = "counting"
    script = Path(train.__file__)

    def arguments(self, plan: Plan, step_s: float) -> list[str]:
        return [str(plan.run), str(plan.folder), str(plan.steps), str(step_s)]

    def starts(self, plan: Plan) -> list[dict[str, int]]:
        path = plan.folder / "starts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def check(self, plan: Plan) -> None:
        assert json.loads((plan.folder / "result.json").read_text()) == train.control(plan.steps, plan.world)


class Lightning:
    """The example of the repository: LightningCLI, a small GPT, the callback. Weights, optimizer, samples, curves."""

    name = "lightning"
    script = EXAMPLE / "train.py"
    epochs = 2
    batch = 16

    def arguments(self, plan: Plan, step_s: float) -> list[str]:
        config = self._config(plan, plan.folder)
        config["trainer"]["callbacks"].append({"class_path": "tests.slurm.pace.Pace", "init_args": {"seconds": step_s}})
        path = plan.folder / "config.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return ["fit", "--config", str(path)]

    def starts(self, plan: Plan) -> list[dict[str, int]]:
        from compare import rows

        claims = [json.loads(path.read_text()) for path in sorted((plan.run / "lives").glob("*.json"))]
        resumed = [claim["info"]["resumed"] for claim in claims]
        steps = [0 if name is None else int(name.rpartition("-")[2]) for name in resumed]
        began = rows(self._job(plan, plan.folder), 0)
        return [
            {"life": life, "step": step}
            for life, (step, rows_of_life) in enumerate(zip(steps, began, strict=False), start=1)
            if rows_of_life
        ]

    def check(self, plan: Plan) -> None:
        from compare import differences

        control = plan.folder / "control"
        control.mkdir()
        path = control / "config.yaml"
        path.write_text(yaml.safe_dump(self._config(plan, control), sort_keys=False))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={plan.world}"]
        world = ["--trainer.num_nodes=1", f"--trainer.devices={plan.world}"]
        done = subprocess.run(
            [*torchrun, str(self.script), "fit", "--config", str(path), *world], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert differences(self._job(plan, control), self._job(plan, plan.folder)) == []

    def _config(self, plan: Plan, folder: Path) -> dict:  # type: ignore[type-arg]
        config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
        config["data"]["windows"] = self._windows(plan)
        config["trainer"].update(
            max_epochs=self.epochs, devices=plan.ranks, num_nodes=plan.nodes, strategy="ddp", enable_progress_bar=False
        )
        folders = {"SpotCallback": ("run", "run"), "Curves": ("folder", "curves"), "Evidence": ("folder", "evidence")}
        for callback in config["trainer"]["callbacks"]:
            argument, name = folders[callback["class_path"].rpartition(".")[2]]
            callback["init_args"][argument] = str(folder / name)
        return config

    def _windows(self, plan: Plan) -> int:
        return self.batch * plan.world * plan.steps // self.epochs

    def _job(self, plan: Plan, folder: Path):  # type: ignore[no-untyped-def]
        from lives import Job

        return Job(folder, ranks=plan.world, epochs=self.epochs, windows=self._windows(plan))
