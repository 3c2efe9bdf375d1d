"""Trains a byte-level GPT on the standard library's sources.

    python train.py fit --config config.yaml
    torchrun --nproc-per-node 2 train.py fit --config config.yaml --trainer.devices 2

Kill it at any instant and run the same line again: it goes on.
"""

from __future__ import annotations

import logging

from byte_gpt import ByteGPT
from lightning.pytorch.cli import LightningCLI
from stdlib_text import StdlibText


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    LightningCLI(ByteGPT, StdlibText, seed_everything_default=7, save_config_callback=None)


if __name__ == "__main__":
    main()
