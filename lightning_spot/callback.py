"""The callback: a script that has it survives being killed, and continues when it is started again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning_spot import _compat, capture
from lightning_spot.fit import Fit
from spot_core.config import Settings
from spot_core.pytorch import fits

_BASES = _compat.callback_bases()


class SpotCallback(*_BASES):  # type: ignore[misc]
    """Saves the whole state of `trainer.fit` and resumes it, exactly, whenever the script is started again.

    Parameters
    ----------
    run: folder or URI of the run; None takes the variable ``SPOT_RUN``. One run per job. Further fits of the same
        script go to `<run>/fit-0001` and so on.
    interval, keep, ...: see `spot_core.config.Settings`; None takes the variable ``SPOT_<NAME>``, then the default
        (``interval="auto"``, ``keep=3``).

    The newest committed generation of the run wins over a `ckpt_path` given to `fit`. Only `fit` is touched; a
    `fast_dev_run` is not. Raises ConfigError before training starts when something does not fit together,
    ResumeMismatchError when the run belongs to another model.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | None = None,
        interval: str | None = None,
        keep: int | None = None,
        *,
        keep_every: int | None = None,
        grace_s: float | None = None,
        window_s: float | None = None,
        exit_code: int | None = None,
        verify: str | None = None,
        writer: str | None = None,
        on_save_error: str | None = None,
        max_failed_saves: int | None = None,
        on_resize: str | None = None,
        allow_pickle: bool | None = None,
        sources: str | None = None,
        local: str | os.PathLike[str] | None = None,
        max_upload_mb_s: float | None = None,
        writers_at_once: int | None = None,
        preflight: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.run = None if run is None else fits.resolve_run(run)
        self.settings = Settings.from_env(
            interval=interval,
            keep=keep,
            keep_every=keep_every,
            grace_s=grace_s,
            window_s=window_s,
            exit_code=exit_code,
            verify=verify,
            writer=writer,
            on_save_error=on_save_error,
            max_failed_saves=max_failed_saves,
            on_resize=on_resize,
            allow_pickle=allow_pickle,
            sources=sources,
            local=None if local is None else os.fspath(local),
            max_upload_mb_s=max_upload_mb_s,
            writers_at_once=writers_at_once,
            preflight=preflight,
            storage_options=storage_options,
        )
        self._fit: Fit | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit" or trainer.fast_dev_run or self._is_second(trainer):
            return
        if any(_compat.early_exit(callback) for callback in capture.tuners(trainer)):
            return  # Tuner.lr_find(...): it tries and leaves, nothing is trained
        _compat.check_version(_compat.package_of(trainer), _compat.version_of(trainer))
        self._move_first(trainer)
        fit = Fit(trainer, pl_module, fits.resolve_run(self.run), self.settings)
        self._fit = fit
        try:
            fit.open()
        except BaseException:
            self._close()
            raise

    def _is_second(self, trainer: Any) -> bool:
        """Of several instances (configuration and environment) the first is the one that acts."""
        return any(c is not self and isinstance(c, SpotCallback) and c._fit is not None for c in trainer.callbacks)

    def _move_first(self, trainer: Any) -> None:
        """Before the others: staging has to be over before one of them changes a weight.

        Saving needs no place among them, it comes after all.
        """
        trainer.callbacks = [self, *(c for c in trainer.callbacks if c is not self)]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.announce()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._fit is not None:
            self._fit.wait_staged()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.wait_staged()

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.validation_batch()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.epoch_ends()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.wait_staged()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.returned()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        # One rank may be here alone: no collective, no waiting for others.
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.close()
