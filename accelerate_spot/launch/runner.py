"""`python -m accelerate_spot.launch.runner [-m] script.py args`: the script, with the flag in force.

As `python script.py args` would run it: it is `__main__`, its folder comes first on the path, and worker processes
that start anew find its classes.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

from accelerate_spot import activation
from accelerate_spot.launch.rewrite import EPOCHS, LEFT, NUMBERED, rewrite
from accelerate_spot.section import Section

log = logging.getLogger("accelerate_spot.launch.runner")  # started by -m, its __name__ is one that nobody listens to

DROPPED = "ACCELERATE_SPOT_ALONE"
"""Set by the launcher when accelerate's launcher would not have used torchrun: its variables are taken away again."""

_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)


def main(argv: list[str]) -> None:
    """Run `argv` (script and arguments, after `-m` for a module). What the script raises comes through."""
    as_module = argv[:1] == ["-m"]
    name, *arguments = argv[1:] if as_module else argv
    if os.environ.pop(DROPPED, ""):
        for variable in [*_TORCHRUN, *(key for key in os.environ if key.startswith("TORCHELASTIC_"))]:
            os.environ.pop(variable, None)
    section = Section.active()
    section.export(os.environ)
    activation.install()
    spec = _find(name) if as_module else None
    path = Path(spec.origin if spec is not None and spec.origin else name)
    source = path.read_bytes()
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    module.__spec__ = spec
    module.__package__ = spec.parent if spec is not None else None
    module.__loader__ = spec.loader if spec is not None else None
    sys.argv = [str(path), *arguments]
    sys.path[0] = os.getcwd() if as_module else str(path.resolve().parent)
    sys.modules["__main__"] = module
    code: Any
    if section.epoch_loop == "rewrite":
        code, lines = rewrite(source, str(path))
        _tell(lines, path)
        vars(module).update({EPOCHS: _epochs, LEFT: _left, NUMBERED: _numbered})
    else:
        code = source
    exec(compile(code, str(path), "exec", dont_inherit=True), vars(module))


def _find(name: str) -> Any:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None:
        raise SystemExit(f"accelerate-spot: no module named {name}")
    return spec


def _tell(lines: list[int], path: Path) -> None:
    if int(os.environ.get("RANK", "0")):
        return
    if lines:
        log.info("spot: the epoch loop in line %s of %s is resumed as it stands", ", ".join(map(str, lines)), path.name)
    else:
        log.warning(
            "spot: %s has no loop `for epoch in range(...)` around a loop over batches: a resume inside a later epoch "
            "needs `for epoch in accelerate_spot.epochs(N):`, or counters in accelerate_spot.state(...)", path.name,
        )


def _epochs(items: Any) -> Any:
    """The loop's items as they are when nothing is attached (a Trainer drives the run, or no Accelerator was made)."""
    from accelerate_spot import attaching

    return attaching.current().epochs(items) if attaching.attached() else items


def _left() -> None:
    from accelerate_spot import attaching

    if attaching.attached():
        attaching.current().left()


def _numbered(items: Any, start: int = 0) -> Any:
    from accelerate_spot import attaching

    return attaching.current().numbered(items, start) if attaching.attached() else enumerate(items, start)


def _speak() -> None:
    """What the run has to say goes to stderr; how the script logs is its own affair."""
    handler = logging.StreamHandler()
    for name in ("accelerate_spot", "spot_core"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


if __name__ == "__main__":
    _speak()
    main(sys.argv[1:])
