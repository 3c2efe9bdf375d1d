"""`from accelerate_spot import Accelerator`: one changed import, for scripts started by python or torchrun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_spot import _compat, activation, attaching


class Accelerator(_compat.accelerator_class()):  # type: ignore[misc]
    """accelerate's, attached to a run.

    spot: `run` and settings as in `spot_config`; what is not given comes from the environment.
    """

    def __init__(self, *args: Any, spot: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        with activation.left_alone():
            super().__init__(*args, **kwargs)
        attaching.attach(self, **(spot or {}))
