"""What runs inside the Slurm job. The tests know a workload by this class only, so that any trainer can take its place:
it trains `steps` steps, may be stopped at any of them, and says whether it ended as an uninterrupted run does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from . import train


@dataclass(frozen=True)
class Workload:
    name: str
    script: Path

    def arguments(self, run: Path, out: Path, steps: int, step_s: float) -> list[str]:
        return [str(run), str(out), str(steps), str(step_s)]

    def starts(self, out: Path) -> list[dict[str, int]]:
        """{"life", "step"} of every start so far, oldest first."""
        path = out / "starts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def check(self, out: Path, steps: int, world: int) -> None:
        """Assert that the end is the uninterrupted run's end, bit for bit."""
        assert json.loads((out / "result.json").read_text()) == train.control(steps, world)


COUNTING = Workload("counting", Path(train.__file__))
