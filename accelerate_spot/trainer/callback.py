"""The callback: a script that has it survives being killed, and continues when it is started again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate_spot.trainer import _compat, patching, refusals
from accelerate_spot.trainer.fit import Fit
from spot_core.config import Settings
from spot_core.errors import ConfigError
from spot_core.pytorch import fits


class SpotTrainerCallback(_compat.TrainerCallback):  # type: ignore[misc]
    """Saves the whole state of `trainer.train()` and resumes it, exactly, whenever the script is started again.

    Parameters
    ----------
    run: folder or URI of the run; None takes the variable ``SPOT_RUN``. One run per job. Further trainings of the same
        script go to `<run>/fit-0001` and so on.
    settings: ``interval``, ``keep``, ... as in `spot_core.config.Settings`; what is not given takes the variable
        ``SPOT_<NAME>``, then the default (``interval="auto"``, ``keep=3``).

    The newest committed generation of the run wins over a `resume_from_checkpoint` given to `train`. A training that
    had finished is not run again: `train` returns what it returned then, with the weights it ended with.

    Raises ConfigError before training starts when something does not fit together, ResumeMismatchError when the run
    belongs to another model, SystemExit with `exit_code` from `train` when the job was told to stop and has saved.
    """

    def __init__(self, run: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        super().__init__()
        self.run = None if run is None else fits.resolve_run(run)
        self.settings = Settings.from_env(**settings)
        self._fit: Fit | None = None
        patching.patch(_compat.module)

    @contextmanager
    def fitting(self, trainer: Any) -> Iterator[Fit]:
        """The fit of the training that begins; inside of it, the same one again."""
        if self._fit is not None:
            yield self._fit
            return
        run = fits.resolve_run(self.run)
        fit = Fit(trainer, run, self.settings, self)
        try:
            fit.open()
            self._fit = fit
            yield fit
            fits.returned(run)
        finally:
            self._fit = None
            fit.close()

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        refusals.check_arguments(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._fit is None:
            raise ConfigError(
                "This trainer trains in a loop of its own: neither Trainer.train nor its loop was called, so nothing "
                "of the training can be saved or resumed.",
                hint="Use a trainer that inherits `train`, or leave SpotTrainerCallback (SPOT_RUN) out.",
            )
        self._fit.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._fit is not None:
            self._fit.stepped()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._fit is not None:
            self._fit.before_step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._fit is not None:
            self._fit.wait_staged()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._fit is not None:
            self._fit.prediction_step()
