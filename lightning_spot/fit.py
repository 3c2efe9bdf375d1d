"""One fit of one trainer: resume, save at step boundaries, finish. The callback translates Lightning's hooks to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from lightning_spot import _compat, capture
from lightning_spot._stopping import Stopping
from lightning_spot.checkpoint_io import SpotCheckpointIO
from lightning_spot.loaders import Loaders
from lightning_spot.resizing import Resizing
from lightning_spot.restore import Restored
from lightning_spot.sharding import Sharded
from spot_core.config import Settings
from spot_core.errors import ConfigError, DeadlineError, ResumeMismatchError, SpotError
from spot_core.manifest import Manifest
from spot_core.patches import Patches
from spot_core.policy import Decision, Kind
from spot_core.pytorch import fits, modules, nested
from spot_core.pytorch.session import Session
from spot_core.run import Run
from spot_core.verify import Depth

log = logging.getLogger(__name__)


class Fit:
    """`open` before the fit's set-up, `begin` when training starts, `boundary` per batch, `end`, `close` always."""

    def __init__(self, trainer: Any, module: Any, run: str, settings: Settings) -> None:
        self._trainer, self._module = trainer, module
        self._run_name, self._settings = run, settings
        self.uri, self.name = fits.location(run)
        self._run = Run.open(self.uri, storage_options=settings.storage_options)
        self._session: Session | None = None
        self._group: Any = None
        self._restored: Restored | None = None
        self._patches = Patches()
        self._loaders: Loaders | None = None
        self._resizing: Resizing | None = None
        self._sharded: Sharded | None = None
        self._stopping = Stopping(trainer, settings.grace_s)
        self._model = ""
        self._step = 0
        self._saved_step = -1
        self._training = False
        self._plugin: Any = None
        self._stepped: set[int] = set()
        self._handles: list[Any] = []
        self._held: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._positions: dict[str, Any] = {}
        self._batches: dict[str, Any] = {}

    # -- resuming ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Put this fit's hands on the trainer; nothing is read or written yet. Raises ConfigError."""
        trainer = self._trainer
        if _compat.launches_workers(trainer):
            raise ConfigError(
                f"SpotCallback does not support the launcher of this strategy ({trainer.strategy.strategy_name}): it "
                "trains in processes that begin in the middle of the script and cannot tell which of its fits this is.",
                hint='Use strategy="ddp", with Lightning\'s own launcher or torchrun.',
            )
        self._plugin = trainer.strategy.checkpoint_io
        if isinstance(self._plugin, SpotCheckpointIO):
            self._plugin.check_strategy(trainer.strategy)
        if trainer.strategy.restore_checkpoint_after_setup:
            if not _compat.shards_model(trainer):
                raise ConfigError(
                    f"SpotCallback does not support {type(trainer.strategy).__name__}: it keeps the state of the model "
                    "in an engine of its own.",
                    hint='Use strategy="ddp", FSDPStrategy or ModelParallelStrategy.',
                )
            self._sharded = Sharded(trainer)
        dirpaths = [str(c.dirpath) for c in trainer.checkpoint_callbacks if getattr(c, "dirpath", None)]
        fits.check_folder(self._run_name, dirpaths, "ModelCheckpoint", "dirpath")
        if trainer.is_global_zero and any(
            _compat.is_instance(trainer, callback, "StochasticWeightAveraging") for callback in trainer.callbacks
        ):
            log.warning(
                "StochasticWeightAveraging sets its schedule up at the start of an epoch and cannot be resumed exactly "
                "inside one; WeightAveraging can"
            )
        self._patches.around(*_compat.restore_owner(trainer), self._around_restore)
        self._patches.around(trainer.strategy, "load_checkpoint", self._around_load)
        seed = trainer.strategy.broadcast(torch.initial_seed() % 2**62)
        self._loaders = Loaders(trainer, seed)
        if self._sharded is not None:
            known = trainer.strategy.broadcast(self._peek() if trainer.is_global_zero else None)
            if known is not None:
                self._resize(self._loaders, known["places"], known["counts"])
        self._patches.around(trainer.fit_loop, "setup_data", self._loaders.around_setup)
        self._patches.around(trainer.strategy, "process_dataloader", self._loaders.around_process)
        self._patches.around(trainer.strategy, "on_train_start", self._around_train_start)
        self._patches.around(trainer.strategy, "on_train_end", self._around_train_end)
        self._patches.around(*_compat.boundary_owner(trainer), self._around_boundary)
        self._stopping.take_over(self._patches)

    def _around_restore(self, restore: Callable[..., None]) -> Callable[..., None]:
        def restore_modules_and_callbacks(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
            self._resume()
            if self._restored is None:
                restore(checkpoint_path, *args, **kwargs)
                return
            where = f"{self.uri} generation {self._restored.generation}"
            if checkpoint_path:
                log.info("resuming from %s: the checkpoint given to fit, %s, is left aside", where, checkpoint_path)
            restore(where)
            self._after_restore(self._restored)

        return restore_modules_and_callbacks

    def _around_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
            restored = self._restored
            if restored is not None and checkpoint_path == f"{self.uri} generation {restored.generation}":
                state = restored.checkpoint(None if self._sharded is not None else self._module)
                if self._sharded is not None:
                    self._sharded.put(state)
                return state
            return load(checkpoint_path, *args, **kwargs)

        return load_checkpoint

    def _resume(self) -> None:
        trainer = self._trainer
        sharded = self._sharded
        self._model = fits.fingerprint(self._module if sharded is None else sharded.model_state())
        if trainer.world_size > 1:
            # A group of our own: the background never meets the training's collectives.
            self._group = dist.new_group(backend="gloo")
        self._session = Session(
            self._run,
            self._settings,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            group=self._group,
            meta=self._meta,
            check=self._check,
        )
        resumed = self._session.resume(template=None if sharded is None else sharded.template)
        self._restored = None if resumed is None else Restored(resumed, trainer)

    def _check(self, manifest: Manifest) -> None:
        fits.check_same(manifest, self.uri, self._model, "lightning", "SpotCallback")
        saved = manifest.meta["lightning"]
        if isinstance(saved, dict) and saved.get("sharded", False) is not (self._sharded is not None):
            raise ResumeMismatchError(
                f"{self.uri} was written with {saved['strategy']}, and the strategy is "
                f"{type(self._trainer.strategy).__name__} now: sharded and whole models name their optimizer's state "
                "differently.",
                hint="Go on with a strategy of the same kind, or start a run of its own from exported weights.",
            )

    def _after_restore(self, restored: Restored) -> None:
        trainer = self._trainer
        # They would search again and, at their end, empty the checkpoint that is being restored.
        dropped = capture.tuners(trainer)
        trainer.callbacks = [callback for callback in trainer.callbacks if callback not in dropped]
        capture.set_tuned_values(trainer, self._module, restored.local["tuned"])
        self._step = restored.step
        if self._loaders is not None:
            self._loaders.seed = restored.local["loaders"]["seed"]
            if self._resizing is None:
                self._resize(self._loaders, restored.places, restored.local["batches"])
        if restored.finished:
            trainer.should_stop = trainer.should_stop or restored.local["should_stop"]
        restored.early_rng()

    def _peek(self) -> dict[str, Any] | None:
        """How the run's newest generation shared out the data, from its marker alone.

        A strategy that restores after its set-up has by then made the loaders, if `configure_optimizers` asked how
        many steps there will be. What is wrong with the run comes out when it is resumed.
        """
        try:
            found = self._run.select(Depth.MARKER).verified
        except SpotError as error:
            log.debug("nothing can be said of the run before it is resumed: %s", error)
            return None
        saved = None if found is None else found.committed.manifest.meta.get("lightning")
        return saved.get("batches") if isinstance(saved, dict) else None

    def _resize(self, loaders: Loaders, places: Sequence[Any], batches: Mapping[str, int]) -> None:
        resizing = Resizing(self._trainer, on_resize=self._settings.on_resize, places=places, **batches)
        self._resizing = loaders.resizing = resizing
        self._patches.around(
            self._trainer.strategy, "backward", lambda backward: resizing.around_backward(backward, loaders.views)
        )
        self._patches.around(self._module, "lr_scheduler_step", resizing.around_schedule)

    # -- training ------------------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """From the callback's `on_train_start`: the next start is the real one, not a tuner's trial."""
        self._training = True

    def _around_train_start(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def on_train_start() -> None:
            start()
            if self._training:
                self._begin()

        return on_train_start

    def _begin(self) -> None:
        trainer, session = self._trainer, self._open_session
        if self._loaders is not None:
            self._loaders.training_starts()
        ranks = 1 if self._sharded is not None else trainer.world_size
        session.start(state_bytes=modules.expected_bytes(self._module, trainer.optimizers, ranks))
        if self._restored is None:
            self._step = int(trainer.global_step)
        else:
            restored, self._restored = self._restored, None  # a whole model in memory: not longer than needed
            restored.when_training_starts(trainer, self._module, self._loaders_placed)
            if self._loaders is not None:
                self._loaders.made = restored.local["loaders"]["made"]
            if restored.local["flags"]["validation_due"]:
                self._patches.around(*_compat.validation_due_owner(trainer), _due_once)
        if not self._module.automatic_optimization:
            for number, optimizer in enumerate(trainer.optimizers):
                self._handles.append(optimizer.register_step_pre_hook(lambda *_: session.wait_staged()))
                self._handles.append(
                    optimizer.register_step_post_hook(lambda *_, number=number: self._stepped.add(number))
                )
        self._stopping.training_starts(session)

    def _loaders_placed(self) -> None:
        if self._resizing is not None and self._loaders is not None:
            self._resizing.training_starts(self._loaders.views)

    def _around_boundary(self, log_row: Callable[..., Any]) -> Callable[..., Any]:
        def update_train_step_metrics() -> None:
            log_row()
            if self._training:
                self._boundary()

        return update_train_step_metrics

    def _boundary(self) -> None:
        self._held = None
        if _compat.accumulating(self._trainer) or (
            not self._module.automatic_optimization and self._trainer.optimizers and not self._stepped
        ):
            return
        self._step += 1
        decision = self._open_session.boundary(self._step)
        if _compat.finishing(self._trainer):
            # The last generation follows within moments, and a stop would throw away a run that is complete.
            self._stepped.clear()
            return
        if decision.kind is not Kind.CONTINUE:
            self._act(decision)
        elif _compat.validation_due(self._trainer):
            self._hold()
        if self._open_session.untried:
            shared, local = self._held or self._capture(at_batch_end=True)
            self._open_session.rehearse(**self._state(shared, local, capture.stable_tensors(self._trainer)))
        self._stepped.clear()

    def validation_batch(self) -> None:
        """A notice during validation is acted upon with the state of the batch before it."""
        if self._held is None:
            return
        decision = self._open_session.boundary(self._step)
        if decision.kind.stops:
            self._act(decision)

    def _act(self, decision: Decision) -> None:
        if decision.kind in (Kind.SAVE, Kind.STOP_SAVE) and self._step > self._saved_step:
            shared, local = self._held or self._capture(at_batch_end=True)
            self._save(shared, local, reason=decision.reason, wait=decision.kind is Kind.STOP_SAVE)
        if decision.kind.stops:
            code = self._open_session.stop(self._step, decision.reason)
            raise _compat.stop_exception(self._trainer, code)

    def _hold(self) -> None:
        """Keep what validation changes; parameters it does not change, unless weights are exchanged for it."""
        shared, local = self._capture(at_batch_end=True)
        if "current_model_state" not in shared:
            self._held = shared, nested.frozen(local)

    def _capture(self, *, at_batch_end: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        trainer, module = self._trainer, self._module
        flags = capture.flags(trainer) if at_batch_end else {"validation_due": False, "last_batch": False}
        loaders = {"seed": 0, "made": 0}
        if self._loaders is not None:
            self._loaders.before_dump()
            loaders = {"seed": self._loaders.seed, "made": self._loaders.made}
            self._positions = self._loaders.position()
        with nullcontext() if self._sharded is None else self._sharded.dumping():
            shared, local = capture.capture(trainer, module, at_batch_end=at_batch_end)
        splits = 1 if self._resizing is None else self._resizing.splits
        local["batches"] = {
            "ranks": _compat.data_ranks(trainer)[1],
            "splits": splits,
            "accumulate": int(trainer.accumulate_grad_batches) // splits,
        }
        places = local["checkpoint"]["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        deals = [{"deal": place.get("deal")} for place in places]
        self._batches = {"counts": local["batches"], "places": deals}
        local |= {"flags": flags, "step": self._step, "loaders": loaders, "gradients": dict(self._partial_gradients())}
        return shared, local

    def _partial_gradients(self) -> Iterator[tuple[str, Any]]:
        """Manual optimization: gradients of parameters whose optimizer has not stepped in this batch."""
        if self._module.automatic_optimization:
            return
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        for number, optimizer in enumerate(self._trainer.optimizers):
            if number in self._stepped:
                continue
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and id(parameter) in names:
                        yield names[id(parameter)], parameter.grad

    def _save(
        self, shared: dict[str, Any], local: dict[str, Any], *, reason: str, finished: bool = False, wait: bool = False
    ) -> None:
        stable = [] if wait else capture.stable_tensors(self._trainer)
        self._saved_step = self._step
        state = self._state(shared, local, stable)
        self._open_session.save(self._step, **state, reason=reason, finished=finished, wait=wait)

    def _state(self, shared: dict[str, Any], local: dict[str, Any], stable: Iterable[torch.Tensor]) -> dict[str, Any]:
        frozen = modules.frozen(self._module)
        return {"shared": shared, "local": local, "stable": stable, "droppable": capture.DROPPABLE, "frozen": frozen}

    def wait_staged(self) -> None:
        if self._session is not None and self._training:
            self._session.wait_staged()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _around_train_end(self, end: Callable[..., Any]) -> Callable[..., Any]:
        def on_train_end() -> None:
            end()
            if self._training:
                self._end()

        return on_train_end

    def _end(self) -> None:
        """After every `on_train_end`, the module's too: the last generation, committed before `fit` returns."""
        self.wait_staged()
        self._held = None
        shared, local = self._capture(at_batch_end=False)
        try:
            self._save(shared, local, reason="the fit has finished", finished=True, wait=True)
        except DeadlineError as late:
            # The machine goes first. To leave as if it were finished would end the job without its last generation.
            raise _compat.stop_exception(self._trainer, self._open_session.stop(self._step, str(late))) from late
        self.flush_plugin()

    def flush_plugin(self) -> None:
        """Checkpoints of Lightning's own that are still being written; their errors come out here."""
        if isinstance(self._plugin, SpotCheckpointIO):
            self._plugin.flush()

    def epoch_ends(self) -> None:
        self.wait_staged()
        if self._training:
            _compat.forget_restart(self._trainer)

    def returned(self) -> None:
        """From `on_fit_end`, also for a fit that had finished in an earlier life and trained nothing."""
        fits.returned(self._run_name)
        restored = self._restored
        if restored is not None and restored.finished and not self._training and self._trainer.is_global_zero:
            # The session, which tells of every other resume, was never started.
            log.warning(
                "spot: resumed from step %d, the end of the fit: nothing is left to train (generation %s of %s)",
                restored.step,
                restored.generation,
                self.uri,
            )

    def close(self) -> None:
        """Undo everything on the trainer and end the session; idempotent, waits for no other rank."""
        self._training = False
        self._patches.undo()
        if self._resizing is not None:
            self._resizing.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._session is not None:
            self._session.close()
            self._session = None

    @property
    def _open_session(self) -> Session:
        if self._session is None:
            raise RuntimeError("the fit has no session: Lightning started training without restoring first")
        return self._session

    def _meta(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "lightning": {
                "model": self._model,
                "fit": self.name,
                "package": _compat.package_of(trainer),
                "version": _compat.version_of(trainer),
                "strategy": type(trainer.strategy).__name__,
                "sharded": self._sharded is not None,
                "batches": self._batches,
            },
            "position": {
                "epoch": int(trainer.current_epoch),
                "global_step": int(trainer.global_step),
                **self._positions,
            },
        }


def _due_once(check: Callable[..., bool]) -> Callable[..., bool]:
    """The validation that was due at the saved batch is due, whatever clocks and counters say now.

    Lightning asks twice: on the way into the loop and after it has passed over the batch.
    """
    left = 2

    def should_check_val(data_fetcher: Any) -> bool:
        nonlocal left
        if left:
            left -= 1
            return True
        return check(data_fetcher)

    return should_check_val
