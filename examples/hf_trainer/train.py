"""A small GPT-2 on the bytes of Python's standard library, by the Transformers `Trainer`: `python train.py --help`.

Every option of `TrainingArguments` is one of the command line. With `--run` (or started by `accelerate-spot launch`)
the training survives being killed; there is nothing else in it that knows of that.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class Options:
    run: str | None = field(default=None, metadata={"help": "folder or URI of the run, e.g. s3://bucket/run1"})
    interval: str | None = field(default=None, metadata={"help": "time or steps between saves (default: auto)"})
    windows: int = field(default=1600, metadata={"help": "samples to train on, 64 bytes each"})


class Bytes(Dataset[dict[str, Tensor]]):
    """Item i: the 64 bytes from 64 * i on, of the sources of the standard library's top-level modules."""

    def __init__(self, count: int, length: int = 64) -> None:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in sources)[: count * length]
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).view(-1, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index].long()
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = HfArgumentParser((TrainingArguments, Options))
    args, options = parser.parse_args_into_dataclasses()
    callbacks = []
    if options.run:
        from accelerate_spot.trainer import SpotTrainerCallback

        callbacks.append(SpotTrainerCallback(options.run, interval=options.interval))
    set_seed(args.seed)  # for the weights that training begins with; the Trainer's own call comes after them
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    data = Bytes(options.windows + 160)
    trainer = Trainer(
        GPT2LMHeadModel(config),
        args,
        train_dataset=Subset(data, range(options.windows)),
        eval_dataset=Subset(data, range(options.windows, len(data))),
        callbacks=callbacks,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
