"""A training script as a user's, run in processes that are killed: `python _script.py --folder DIR --out DIR [...]`.

Appends a line per batch to `<out>/rank<r>.jsonl`, and writes `<out>/final-rank<r>.pt` after `train()`.
Without --folder there is no SpotTrainerCallback in it: an unchanged script.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _harness import Recorded, Samples, model
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainingArguments


class Evidence(TrainerCallback):
    """Counts batches over all lives; kills or tells to stop at the given one."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.options, self.rank = options, rank
        self.mine = options.ranks == "all" or str(rank) in options.ranks.split(",")
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]

    def trained(self, ids: list[int], loss: float) -> None:
        row = {"batch": self.batches, "ids": ids, "loss": loss}
        self.batches += 1
        with (self.options.out / f"rank{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def before(self) -> None:
        """In front of a batch."""
        threading.Event().wait(self.options.pause)
        if self.mine and self.batches == self.options.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mine and self.batches == self.options.term and not self.options.in_evaluation:
            self._term()
        if self.mine and self.batches == self.options.fail:
            raise ValueError("something is wrong with this batch")

    def _term(self) -> None:
        self.options.term = None
        os.kill(os.getpid(), signal.Signals[self.options.signal])

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        threading.Event().wait(self.options.pause)
        if self.mine and self.options.in_evaluation and self.batches == self.options.term:
            self._term()


class Stream(IterableDataset[Any]):
    """Without length or index; augmented."""

    def __iter__(self) -> Any:
        samples = Samples(46, augment=True)
        return (samples[index] for index in range(46))


class Reported(Recorded):
    evidence: Evidence

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.evidence.before()
        loss = super().training_step(*args, **kwargs)
        self.evidence.trained(self.ids[-1], self.losses[-1])
        return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", default="2 steps")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--term", type=int)
    parser.add_argument("--signal", default="SIGTERM")
    parser.add_argument("--fail", type=int)
    parser.add_argument("--ranks", default="all")
    parser.add_argument("--in-evaluation", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--arguments", type=json.loads, default={}, help="more TrainingArguments, as JSON")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    args = TrainingArguments(
        output_dir=str(options.out / "checkpoints"),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=options.accumulate,
        dataloader_num_workers=options.workers,
        dataloader_pin_memory=False,
        learning_rate=0.01,
        logging_steps=3,
        eval_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=True,
        **{"save_strategy": "no", **options.arguments},
    )
    torch.manual_seed(1)
    evidence = Evidence(options, args.process_index)
    callbacks: list[Any] = [evidence]
    if options.folder:
        from accelerate_spot.trainer import SpotTrainerCallback

        callbacks.append(SpotTrainerCallback(options.folder, interval=options.every, sources="signals:sigterm+sigusr1"))
    data = Stream() if options.stream else Samples(46, augment=True)
    trainer = Reported(model(), args, train_dataset=data, eval_dataset=Samples(12), callbacks=callbacks)
    trainer.evidence = evidence
    result = trainer.train()
    final = {
        "model": trainer.model.state_dict(),
        "loss": result.training_loss,
        "step": result.global_step,
        "best": [trainer.state.best_metric, trainer.state.best_global_step],
        "rates": [[row["step"], row["learning_rate"]] for row in trainer.state.log_history if "loss" in row],
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    }
    torch.save(final, options.out / f"final-rank{args.process_index}.pt")


if __name__ == "__main__":
    main()
