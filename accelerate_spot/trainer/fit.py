"""One training of one Trainer: resume, save at step boundaries, finish. The callback's hooks and a few patches on the
trainer's instance lead here.

The boundary is the end of an optimizer step, after every `on_step_end` and before what follows from it: the row to
log, the evaluation, the Trainer's own checkpoint. What is due then belongs to the generation and is done after a
resume, so that a job may also stop in the middle of a long evaluation.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accelerate_spot.trainer import _compat, capture, refusals, resizing
from accelerate_spot.trainer.loaders import Later, TrainingData, protected
from accelerate_spot.trainer.restore import Restored
from spot_core.clock import SYSTEM_CLOCK
from spot_core.config import Settings
from spot_core.errors import DeadlineError, ResumeMismatchError
from spot_core.patches import Patches
from spot_core.policy import Decision, Kind
from spot_core.pytorch import fits, modules, nested
from spot_core.pytorch.session import Session
from spot_core.run import Run

log = logging.getLogger(__name__)


class Fit:
    """`open` before the training, `train` around its loop, `begin` when it starts, `close` always."""

    def __init__(self, trainer: Any, run: str, settings: Settings, callback: Any) -> None:
        self._trainer, self._callback, self._settings = trainer, callback, settings
        self._run_name = run
        self.uri, self.name = fits.location(run)
        self._run = Run.open(self.uri, storage_options=settings.storage_options)
        self._session: Session | None = None
        self._group: Any = None
        self._restored: Restored | None = None
        self._taken: str | None = None
        self._patches = Patches()
        self._data: TrainingData | None = None
        self._seed = 0
        self._model = ""
        self._step = 0
        self._saved_step = -1
        self._tried = False
        self._stepped = False
        self._resuming = False
        self._epoch: dict[str, int] = {}
        self._accumulation = self._given_accumulation = 0
        self._seconds_before = 0.0
        self._began = 0.0
        self._last_row: dict[str, Any] = {"grad_norm": None, "learning_rate": None}
        self._held: tuple[dict[str, Any], dict[str, Any]] | None = None

    # -- coming up -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Look for a generation and load it; nothing is written yet. Collective."""
        trainer = self._trainer
        _compat.check(trainer)
        refusals.check_trainer(trainer)
        fits.check_folder(self._run_name, [str(trainer.args.output_dir)], "The Trainer", "output_dir")
        self._model = fits.fingerprint(trainer.model)
        callbacks = trainer.callback_handler.callbacks
        # Before the others: staging has to be over before one of them changes a weight.
        callbacks.insert(0, callbacks.pop(callbacks.index(self._callback)))
        self._look()

    def _look(self) -> None:
        args = self._trainer.args
        if args.world_size > 1 and self._group is None:
            # A group of our own: the background never meets the training's collectives.
            self._group = dist.new_group(backend="gloo")
        self._session = Session(
            self._run,
            self._settings,
            rank=args.process_index,
            world_size=args.world_size,
            group=self._group,
            meta=self._meta,
            check=lambda manifest: fits.check_same(
                manifest, self.uri, self._model, "transformers", "SpotTrainerCallback"
            ),
        )
        resumed = self._session.resume()
        self._restored = None if resumed is None else Restored(resumed, self.uri)

    def choose(self, given: Any) -> Any:
        """What the Trainer is to take for `resume_from_checkpoint`: the run wins when it has a generation."""
        if self._restored is not None:
            if given:
                log.info("resuming from %s: resume_from_checkpoint=%r is left aside", self._restored.name, given)
            return None
        output_dir = self._trainer.args.output_dir
        if given is True and (not os.path.isdir(output_dir) or _compat.get_last_checkpoint(output_dir) is None):
            log.info("there is no checkpoint in %s and no generation in %s: training begins", output_dir, self.uri)
            return None
        return given

    def train(self, loop: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The Trainer's loop, from its place on. With `auto_find_batch_size` this is called once per size tried."""
        trainer = self._trainer
        again, self._tried = self._tried, True
        if again:
            self._close_session()
            self._look()
        restored = self._restored
        bound = inspect.signature(loop).bind(*args, **kwargs)
        if restored is not None:
            if restored.finished:
                self._say_finished(restored)
                return restored.output(trainer)
            if trainer.args.auto_find_batch_size:
                self._take_batch_size(restored, bound.arguments, again=again)
            bound.arguments["resume_from_checkpoint"] = self._taken = restored.name
            self._accumulation = resizing.accumulation(
                restored.local["accumulation"],
                saved_world=restored.world_size,
                args=trainer.args,
                on_resize=self._settings.on_resize,
            )
            restored.load_model(trainer)
        self._take_hold()
        result = loop(*bound.args, **bound.kwargs)
        self._finish(result)
        return result

    def _take_batch_size(self, restored: Restored, arguments: dict[str, Any], *, again: bool) -> None:
        """The size that the run was begun with, whatever a search would begin with."""
        size = int(restored.local["batch_size"])
        if again:
            raise ResumeMismatchError(
                f"{restored.name} was trained with batches of {size} per device, which do not fit now; with "
                "smaller ones its place in the data is not defined. Nothing was changed.",
                hint="Start on a device with as much memory as before, or give this job a run folder of its own.",
            )
        arguments["batch_size"] = size

    def _say_finished(self, restored: Restored) -> None:
        if self._trainer.is_world_process_zero():
            log.warning(
                "spot: resumed from step %d, the end of the training: nothing is left to train (%s)",
                restored.step,
                restored.name,
            )

    def _take_hold(self) -> None:
        trainer, around = self._trainer, self._patches.around
        self._given_accumulation = int(trainer.args.gradient_accumulation_steps)
        seed = torch.initial_seed() % 2**62 if self._restored is None else int(self._restored.local["seed"])
        self._seed = self._from_first(seed)
        around(trainer, "get_train_dataloader", self._around_train_loader)
        for name in ("get_eval_dataloader", "get_test_dataloader"):
            around(trainer, name, lambda get: lambda *args, **kwargs: protected(get(*args, **kwargs)))
        for name in _compat.METHODS:
            make = getattr(self, f"_around{name}", None)
            if make is not None:
                around(trainer, name, make)
        if self._restored is not None:
            # The evaluation before the first step has been, and skipping by index costs nothing.
            for name in ("eval_on_start", "ignore_data_skip"):
                around(trainer.args, name, lambda _: False)
            around(trainer.args, "gradient_accumulation_steps", lambda _: self._accumulation)

    def _from_first(self, number: int) -> int:
        if self._group is None:
            return number
        numbers = [number]
        dist.broadcast_object_list(numbers, src=0, group=self._group)
        return numbers[0]

    # -- what the Trainer asks for while it starts ---------------------------------------------------------------------

    def _around_train_loader(self, get: Callable[..., Any]) -> Callable[..., Any]:
        def get_train_dataloader(*args: Any, **kwargs: Any) -> Any:
            options = self._trainer.args
            loader = get(*args, **kwargs)
            if self._data is not None:
                return loader  # the first is the one that is trained on; somebody else wants to look
            self._data = TrainingData(
                loader, seed=self._seed, rank=options.process_index, world_size=options.world_size
            )
            return self._data.loader

        return get_train_dataloader

    def _around_init_training_state(self, init: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(init)

        def _init_training_state(*args: Any, **kwargs: Any) -> Any:
            restored = self._restored
            if restored is None:
                return init(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.arguments["resume_from_checkpoint"] = None
            init(*bound.args, **bound.kwargs)
            restored.load_state(self._trainer, int(bound.arguments["num_update_steps_per_epoch"]))
            self._step = self._saved_step = restored.step
            self._resuming = True
            return restored.epoch, restored.batches(self._accumulation, self._open_data)

        return _init_training_state

    def _around_load_optimizer_and_scheduler(self, load: Callable[..., Any]) -> Callable[..., Any]:
        return self._instead(load, lambda restored: restored.load_optimizer_and_scheduler(self._trainer))

    def _around_load_scaler(self, load: Callable[..., Any]) -> Callable[..., Any]:
        return self._instead(load, lambda restored: restored.load_scaler(self._trainer))

    def _around_load_rng_state(self, load: Callable[..., Any]) -> Callable[..., Any]:
        return self._instead(load, lambda restored: None)  # it is in place since before the first batch was fetched

    def _instead(self, load: Callable[..., Any], take: Callable[[Restored], None]) -> Callable[..., Any]:
        def load_from(checkpoint: Any) -> Any:
            if self._taken is None or checkpoint != self._taken:
                return load(checkpoint)
            return None if self._restored is None else take(self._restored)

        return load_from

    def begin(self) -> None:
        """From `on_train_begin`."""
        trainer = self._trainer
        size = modules.expected_bytes(trainer.model, [capture.plain_optimizer(trainer)], trainer.args.world_size)
        self._open_session.start(state_bytes=size)
        self._began = SYSTEM_CLOCK.monotonic()

    def _around_run_epoch(self, run: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(run)

        def _run_epoch(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given = bound.arguments
            self._epoch = {
                "epoch": int(given["epoch"]),
                "updates": 0,
                "updates_per_epoch": int(given["num_update_steps_per_epoch"]),
                "batches_per_epoch": int(given["steps_in_epoch"]),
            }
            if not self._resuming:
                if given["resume_from_checkpoint"] is not None and given["epoch"] == given["epochs_trained"]:
                    options = self._trainer.args
                    trained = 0 if options.ignore_data_skip else int(given["steps_trained_in_current_epoch"])
                    self._epoch["updates"] = trained // options.gradient_accumulation_steps
                with _compat.skipping(Later):
                    return run(*bound.args, **bound.kwargs)
            self._resuming = False
            assert self._restored is not None
            restored, self._restored = self._restored, None  # a whole model in memory: not longer than needed
            self._epoch["updates"] = restored.updates
            self._enter_loop(restored, given)
            with _compat.skipping(lambda loader, batches: loader):  # it stands at its place already
                return run(*bound.args, **bound.kwargs)

        return _run_epoch

    def _enter_loop(self, restored: Restored, given: dict[str, Any]) -> None:
        """Take up the place in the epoch, and first do what was due after the saved step."""
        trainer = self._trainer
        restored.into_loop(trainer)
        self._seconds_before = float(restored.local["seconds"])
        self._last_row = dict(restored.local["row"])
        place = restored.place(self._accumulation, self._open_data, trainer.args.world_size)
        self._open_data.take_up(place, ended=False)
        self._hold()
        row = {name: given[name] for name in ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")}
        _compat.do_what_is_due(trainer, **row, **self._last_row)
        over = trainer.control.should_epoch_stop or trainer.control.should_training_stop
        if over or restored.updates >= self._epoch["updates_per_epoch"]:
            # Nothing of the epoch is left but its end.
            given["num_update_steps_per_epoch"] = 0
            given["train_dataloader"] = []
            self._open_data.take_up(place, ended=True)

    # -- at every step -------------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """From `on_step_end`: what follows, once the other callbacks have had theirs, is the boundary."""
        self._stepped = True

    def before_step(self) -> None:
        """From `on_pre_optimizer_step`."""
        self._held = None
        self.wait_staged()

    def _around_maybe_log_save_evaluate(self, follow: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(follow)

        def _maybe_log_save_evaluate(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given = bound.arguments
            if self._stepped:
                self._stepped = False
                self._last_row = {name: given.get(name) for name in self._last_row}
                self._boundary()
            else:
                # The end of an epoch of which this life has trained nothing.
                given.update({name: value for name, value in self._last_row.items() if given.get(name) is None})
            return follow(*bound.args, **bound.kwargs)

        return _maybe_log_save_evaluate

    def _boundary(self) -> None:
        self._held = None
        self._step = int(self._trainer.state.global_step)
        self._epoch["updates"] += 1
        decision = self._open_session.boundary(self._step)
        if decision.kind is not Kind.CONTINUE:
            self._act(decision)
        control = self._trainer.control
        over = control.should_epoch_stop or control.should_training_stop
        if control.should_evaluate or over or self._epoch["updates"] >= self._epoch["updates_per_epoch"]:
            self._hold()
        if self._open_session.untried:
            shared, local = self._held or self._capture()
            self._open_session.rehearse(**self._state(shared, local))

    def prediction_step(self) -> None:
        """A notice during an evaluation is acted upon with the state of the step before it."""
        if self._held is None:
            return
        decision = self._open_session.boundary(self._step)
        if decision.kind.stops:
            self._act(decision)

    def _act(self, decision: Decision) -> None:
        if decision.kind in (Kind.SAVE, Kind.STOP_SAVE) and self._step > self._saved_step:
            shared, local = self._held or self._capture()
            self._save(shared, local, reason=decision.reason, wait=decision.kind is Kind.STOP_SAVE)
        if decision.kind.stops:
            raise SystemExit(self._open_session.stop(self._step, decision.reason))

    def _hold(self) -> None:
        """Keep what the rest of the step changes; weights it does not change, unless they are exchanged for it."""
        if not capture.exchanges_weights(self._trainer):
            shared, local = self._capture()
            self._held = shared, nested.frozen(local)

    def _capture(self) -> tuple[dict[str, Any], dict[str, Any]]:
        shared, local = capture.capture(self._trainer)
        accumulation = int(self._trainer.args.gradient_accumulation_steps)
        batches = self._epoch["updates"] * accumulation
        local |= {
            "place": {**self._epoch, "batches": min(batches, self._epoch["batches_per_epoch"])},
            "accumulation": {"given": self._given_accumulation, "used": accumulation},
            "data": self._open_data.place(),
            "seed": self._seed,
            "row": {name: _plain(value) for name, value in self._last_row.items()},
            "seconds": self._seconds(),
        }
        return shared, local

    def _seconds(self) -> float:
        return self._seconds_before + SYSTEM_CLOCK.monotonic() - self._began

    def _save(
        self, shared: dict[str, Any], local: dict[str, Any], *, reason: str, finished: bool = False, wait: bool = False
    ) -> None:
        self._saved_step = self._step
        state = self._state(shared, local)
        if wait:
            state["stable"] = []
        self._open_session.save(self._step, **state, reason=reason, finished=finished, wait=wait)

    def _state(self, shared: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
        stable, frozen = capture.stable_tensors(self._trainer, shared), modules.frozen(self._trainer.model)
        return {"shared": shared, "local": local, "stable": stable, "frozen": frozen}

    def wait_staged(self) -> None:
        """Before weights change otherwise than by `before_step` (the best model is loaded)."""
        if self._session is not None:
            self._session.wait_staged()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _around_finalize_training(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(finalize)

        def _finalize_training(*args: Any, **kwargs: Any) -> Any:
            self._held = None
            self.wait_staged()
            bound = signature.bind(*args, **kwargs)
            bound.arguments["start_time"] -= self._seconds_before  # the rates of all lives, as the mean loss is
            return finalize(*bound.args, **bound.kwargs)

        return _finalize_training

    def _finish(self, result: Any) -> None:
        """After every `on_train_end`: the last generation, committed before `train` returns."""
        self._step = int(self._trainer.state.global_step)
        shared, local = self._capture()
        local["output"] = [result.global_step, result.training_loss, dict(result.metrics)]
        try:
            self._save(shared, local, reason="the training has finished", finished=True, wait=True)
        except DeadlineError as late:
            # The machine goes first. To leave as if it were finished would end the job without its last generation.
            raise SystemExit(self._open_session.stop(self._step, str(late))) from late

    def close(self) -> None:
        """Undo everything on the trainer and end the session; idempotent, waits for no other rank."""
        self._close_session()

    def _close_session(self) -> None:
        self._patches.undo()
        self._held = self._restored = self._data = self._taken = None
        self._stepped = self._resuming = False
        session, self._session = self._session, None
        if session is not None:
            session.close()

    @property
    def _open_session(self) -> Session:
        assert self._session is not None, "the fit is closed"
        return self._session

    @property
    def _open_data(self) -> TrainingData:
        assert self._data is not None, "the Trainer trains without having asked for its loader"
        return self._data

    def _meta(self) -> dict[str, Any]:
        data = {} if self._data is None else self._data.place()
        shown = {key: data[key] for key in ("pass", "batches", "offset") if key in data}
        return {
            "transformers": {"model": self._model, "fit": self.name},
            "data": {"epoch": self._epoch.get("epoch"), "updates": self._epoch.get("updates"), **shown},
        }


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
