"""The kill harness is the example's own: what the README shows is what is tested."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "lightning_gpt"))
