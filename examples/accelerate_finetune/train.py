"""Fine-tunes a small GPT-2 on the sources of Python's standard library, with LoRA: a script as accelerate's examples.

There is nothing in it about being killed: the run is in spot.yaml beside it.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup


def standard_library_text(size: int) -> bytes:
    """The first ``size`` bytes of the top-level modules' sources: real text without a download."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    if len(text) < size:
        raise ValueError(f"the standard library has only {len(text)} bytes of top-level sources, {size} were asked for")
    return text[:size]


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of ``length`` bytes; a byte is a token."""

    def __init__(self, text: bytes, length: int) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index * self.length : (index + 1) * self.length].long()
        return {"input_ids": tokens, "labels": tokens, "sample": torch.tensor(index)}


def make_model(length: int) -> torch.nn.Module:
    """GPT-2's shape, small, over bytes; only the adapters are trained, and the base stays as it is."""
    config = GPT2Config(
        vocab_size=256, n_positions=length, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    adapters = LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM",
        modules_to_save=["lm_head"],
    )
    return get_peft_model(GPT2LMHeadModel(config), adapters)


def training_function(args: argparse.Namespace) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    text = standard_library_text((args.windows + args.windows // 10) * args.length)
    train_data = Windows(text[: args.windows * args.length], args.length)
    eval_data = Windows(text[args.windows * args.length :], args.length)
    train_dataloader = DataLoader(train_data, batch_size=args.batch_size, shuffle=True, num_workers=args.workers)
    eval_dataloader = DataLoader(eval_data, batch_size=args.batch_size)
    model = make_model(args.length)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    updates = len(train_dataloader) // args.gradient_accumulation_steps * args.num_epochs
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, updates // 10, updates)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(args.num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            samples = batch.pop("sample")
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            row = {"epoch": epoch, "step": step, "loss": loss.item(), "samples": samples.tolist()}
            write(args.out, accelerator, row)

        model.eval()
        losses = []
        for batch in eval_dataloader:
            batch.pop("sample")
            with torch.no_grad():
                losses.append(accelerator.gather_for_metrics(model(**batch).loss.repeat(args.batch_size)))
        accelerator.print(f"epoch {epoch}: evaluation loss {torch.cat(losses).mean().item():.4f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        state = accelerator.unwrap_model(model).state_dict()
        torch.save({name: value for name, value in state.items() if "lora" in name}, args.out / "adapters.pt")
    accelerator.end_training()


def write(out: Path, accelerator: Accelerator, row: dict[str, object]) -> None:
    """One line per batch, for the curve and for who wants to compare."""
    with (out / f"losses-rank{accelerator.process_index}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for losses and adapters")
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--windows", type=int, default=3200)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    training_function(args)


if __name__ == "__main__":
    main()
