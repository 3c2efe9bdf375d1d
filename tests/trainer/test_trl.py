"""TRL's trainers inherit `train`: SFTTrainer, killed after a save and started again (L3). Needs `pip install trl`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from accelerate_spot.trainer import SpotTrainerCallback
from spot_core.pytorch import fits

from ._harness import Events, KillAfterSave, Killed, assert_equal, model

pytestmark = pytest.mark.slow


def start(at: Path, *, every: str = "1000 steps", kill: int | None = None, seed: int = 7) -> Any:
    trl = pytest.importorskip("trl")
    fits._returned.clear()
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w1"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0", unk_token="w1")
    data = datasets.Dataset.from_dict({"input_ids": [[(row * 7 + k) % 64 for k in range(8)] for row in range(22)]})
    spot = SpotTrainerCallback(at / "run", interval=every, sources="none", writer="thread")
    events = Events()
    args = trl.SFTConfig(
        output_dir=str(at / "out"),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        logging_steps=2,
        max_length=8,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )
    torch.manual_seed(1)
    callbacks = [events, spot] if kill is None else [KillAfterSave(kill, spot), events, spot]
    trainer = trl.SFTTrainer(model(), args, train_dataset=data, processing_class=tokenizer, callbacks=callbacks)
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    try:
        trainer.train()
    except Killed:
        assert kill is not None
    return trainer, events.seen


def test_sft_continues(tmp_path: Path) -> None:
    control, wanted = start(tmp_path / "control")
    _, first = start(tmp_path / "job", every="13 steps", kill=13)
    done, second = start(tmp_path / "job", seed=99)
    assert_equal([*first, *second], wanted, "events")
    assert_equal(dict(done.model.state_dict()), dict(control.model.state_dict()), "weights")
    assert_equal(done.optimizer.state_dict(), control.optimizer.state_dict(), "optimizer")
