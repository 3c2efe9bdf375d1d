"""Trains a small Transformer to tell which package of Python's standard library a piece of source comes from.

In the shape of accelerate's own examples, as one finds scripts: `python train.py`, `accelerate launch train.py`.
"""

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, Subset

PACKAGES = ("asyncio", "email", "http", "importlib", "multiprocessing", "unittest")


class Pieces(Dataset):
    """Pieces of `length` bytes of source, each with the number of the package that it is from."""

    def __init__(self, length):
        library = Path(sysconfig.get_path("stdlib"))
        self.pieces = []
        for label, package in enumerate(PACKAGES):
            text = b"".join(path.read_bytes() for path in sorted((library / package).glob("*.py")))
            for start in range(0, len(text) - length, length):
                self.pieces.append((text[start : start + length], label))

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        piece, label = self.pieces[index]
        return {"tokens": torch.tensor(list(piece)), "labels": label, "index": index}


class Classifier(torch.nn.Module):
    def __init__(self, length, width=48):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.positions = torch.nn.Parameter(torch.zeros(length, width))
        layer = torch.nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2)
        self.head = torch.nn.Linear(width, len(PACKAGES))

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens) + self.positions).mean(1))


def get_dataloaders(args):
    pieces = Pieces(args.length)
    drawn = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist()
    train, evaluation = drawn[: args.train_size], drawn[args.train_size : args.train_size + args.train_size // 8]
    # A generator for each loader: what they draw changes nothing for dropout.
    orders = [torch.Generator().manual_seed(args.seed) for _ in range(2)]
    train_dataloader = DataLoader(
        Subset(pieces, train),
        shuffle=True,
        batch_size=args.batch_size,
        num_workers=args.num_workers,
        generator=orders[0],
    )
    eval_dataloader = DataLoader(Subset(pieces, evaluation), batch_size=2 * args.batch_size, generator=orders[1])
    return train_dataloader, eval_dataloader


def training_function(args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(args.seed)
    args.output_dir.mkdir(parents=True, exist_ok=True)

    train_dataloader, eval_dataloader = get_dataloaders(args)
    model = Classifier(args.length)
    optimizer = AdamW(model.parameters(), lr=args.lr / 25)
    lr_scheduler = OneCycleLR(
        optimizer,
        max_lr=args.lr,
        epochs=args.num_epochs,
        steps_per_epoch=len(train_dataloader) // args.gradient_accumulation_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    loss_function = torch.nn.CrossEntropyLoss()

    for epoch in range(args.num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            loss = loss_function(model(batch["tokens"]), batch["labels"])
            accelerator.backward(loss / args.gradient_accumulation_steps)
            if (step + 1) % args.gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            row = {"epoch": epoch, "step": step, "loss": loss.item(), "samples": batch["index"].tolist()}
            with (args.output_dir / f"log-{accelerator.process_index}.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")

        model.eval()
        right = []
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(batch["tokens"]).argmax(-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right.append(predictions == references)
        accelerator.print(f"epoch {epoch}: accuracy {torch.cat(right).float().mean().item():.4f}")

    accelerator.wait_for_everyone()
    accelerator.save_model(model, args.output_dir / "model")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="the launcher's choice by default")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even if there is a GPU")
    parser.add_argument("--output_dir", type=Path, default=Path("out"))
    parser.add_argument("--num_epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--train_size", type=int, default=4096)
    parser.add_argument("--length", type=int, default=64, help="bytes in a piece")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
