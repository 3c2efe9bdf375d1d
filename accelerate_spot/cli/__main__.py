"""`python -m accelerate_spot.cli`."""

from __future__ import annotations

from accelerate_spot.cli import main

main()
