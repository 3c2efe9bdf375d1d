"""Take the snapshot: copy tensors into the writer's slab, most of them while the next forward and backward run.

Two kinds of tensors. *Stable* ones (parameters, optimizer state) are changed by nothing until `wait_staged` returned:
a thread copies them in the background, group by group, and the writer follows. All others are copied before `stage`
returns: forward itself changes some of them (BatchNorm's running statistics, FP8 scales), and a late copy of those
would be a different step's.

The background copy holds no lock of Python's for longer than it takes to pass a list of tensors (`Tensor.copy_` runs
without the GIL; `UntypedStorage.copy_`, on which DCP's stager is built, holds it for the whole copy). `wait_staged`
does not stand by: it copies what nobody has begun itself, and waits only for the group that the thread has in hand.

On CUDA the background copies run on a side stream that first waits for what is queued on the current stream, into
page-locked memory; `wait_staged` then makes the current stream wait for them, not the CPU.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from spot_core.memory import local_world_size
from spot_core.pytorch._private import foreach_copy
from spot_core.pytorch.fetch import memory as bytes_of
from spot_core.pytorch.pieces import Piece, Pieces
from spot_core.pytorch.pinning import Pinned
from spot_core.pytorch.state import PLAIN_TENSORS
from spot_core.writer import Bases, WriterClient
from spot_core.writer.slab import Slab

SMALL_BYTES = 4096
"""Where all stable tensors are at most this size they are copied at once: cheaper than to wake a thread for them."""

_FIRST_GROUP_BYTES, _GROUP_BYTES = 8 << 20, 64 << 20
"""The writer hears of the snapshot's progress in steps of about the latter size; the first ones are smaller, each twice
the one before, so that it begins at once."""

_MOST_LOOKERS = 4


_Base: TypeAlias = tuple[int, memoryview, torch.Tensor]
"""Number, bytes and place in the slab of an item of the base."""


class Item(Protocol):
    """One tensor of a snapshot (`PlannedItem`)."""

    @property
    def tensor(self) -> torch.Tensor: ...

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class Plan(Protocol):
    """What goes where (`RankPlan`): items that do not overlap, at multiples of 64 bytes, in a blob of `size` bytes; and
    those of a base, apart. All take `room` bytes of the slab."""

    @property
    def items(self) -> Sequence[Item]: ...

    @property
    def size(self) -> int: ...

    @property
    def bases(self) -> Sequence[Item]: ...

    @property
    def base_start(self) -> int: ...

    @property
    def room(self) -> int: ...


class Look(Protocol):
    """What is done with the items of a plan's `bases`, whose offsets count from `base_start` (`bases.Look`)."""

    def at_source(self, number: int, source: memoryview, target: torch.Tensor) -> None: ...

    def finish(self, slab: Slab) -> Bases: ...


def storage_ids(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """The addresses of the tensors' storages, as `Stager.stage` wants them; local shards of DTensors."""
    found = list(tensors)
    if not PLAIN_TENSORS.issuperset(map(type, found)):
        found = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in found]
    # At every save, so by C code: a tenth of a millisecond less for each thousand tensors.
    return frozenset(map(torch.UntypedStorage.data_ptr, map(torch.Tensor.untyped_storage, found)))


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Small:
    """Tensors that are copied as bytes. The sources lie as written."""

    def __init__(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self._targets, self._sources = targets, sources
        self._addresses: list[int] = []
        self._bytes: list[tuple[memoryview, memoryview]] = []
        self._find()

    def copy(self) -> None:
        # `tensor.data = ...` gives a tensor another memory.
        if list(map(torch.Tensor.data_ptr, self._sources)) != self._addresses:
            self._find()
        for target, source in self._bytes:
            target[:] = source

    def _find(self) -> None:
        self._addresses = list(map(torch.Tensor.data_ptr, self._sources))
        self._bytes = list(zip(map(bytes_of, self._targets), map(bytes_of, self._sources), strict=True))


@dataclass
class _Group:
    """Copies that are started together; `end` is where the snapshot is complete to once they are done."""

    end: int = 0
    nbytes: int = 0
    host: tuple[list[torch.Tensor], list[torch.Tensor]] = field(default_factory=lambda: ([], []))
    small: _Small | None = None
    """Small ones of `host`, which `to_bytes` moved here."""
    cuda: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=dict)

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        pair = self.cuda.setdefault(source.device, ([], [])) if source.is_cuda else self.host
        pair[0].append(target)
        pair[1].append(source)
        self.nbytes += target.nbytes

    def to_bytes(self) -> None:
        """For copies that will be made again and again: small ones as plain bytes, in a third of the time that torch
        takes to copy as little. To find the bytes takes longer than one such copy."""
        if self.small is not None:
            return
        pairs = list(zip(*self.host, strict=True))
        small = [pair for pair in pairs if pair[1].nbytes <= SMALL_BYTES and _lies_as_written(pair[1])]
        rest = [pair for pair in pairs if pair[1].nbytes > SMALL_BYTES or not _lies_as_written(pair[1])]
        self.small = _Small([target for target, _ in small], [source for _, source in small])
        self.host = [target for target, _ in rest], [source for _, source in rest]

    def copy_host(self) -> None:
        if self.small is not None:
            self.small.copy()
        if self.host[0]:
            foreach_copy(*self.host)

    def start_cuda(self, stream: Any) -> None:
        """Queue the copies from every device, on `stream(device)`."""
        for device, (targets, sources) in self.cuda.items():
            with torch.cuda.stream(stream(device)):
                foreach_copy(targets, sources, non_blocking=True)


@dataclass
class _Copies:
    """A plan compiled against a slab: views into it beside the tensors they are filled from."""

    plan: Plan
    stable: Container[int]
    slab: Slab
    now: _Group
    later: list[_Group]
    devices: frozenset[torch.device]
    base_now: list[_Base]
    """Of the base's items those that can be looked at where they lie."""
    base_later: list[_Base]

    def to_bytes(self) -> None:
        for group in (self.now, *self.later):
            group.to_bytes()


class Stager:
    """Copies snapshots into the slab of `client`, one at a time. `stage` and `wait_staged` belong to one thread."""

    def __init__(self, client: WriterClient) -> None:
        self.staged = threading.Event()
        """Set when the snapshot is in host memory; also when it failed, which the job's future tells."""
        self.staged.set()
        self._client = client
        self._copies: _Copies | None = None
        self._memory: Pinned | None = None
        self._released = threading.Event()  # host copies done, device copies queued
        self._released.set()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._ends: list[torch.cuda.Event] = []
        self._begun: Callable[[], None] | None = None
        self._pieces = Pieces((), client.advance)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lookers: ThreadPoolExecutor | None = None

    def reserve(self, nbytes: int) -> None:
        """Take (and on CUDA page-lock) the memory for a snapshot of `nbytes` in the background. See the client's."""
        self._client.reserve(nbytes)
        self._hire()  # the first save would wait for the thread's start, up to a switch interval of the interpreter
        slab = self._client.slab
        on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if slab is not None and on_device and self.staged.is_set():
            memory, device = self._memory_of(slab), torch.device("cuda", torch.cuda.current_device())
            self._hand_over(lambda: memory.pin(device))

    def prepare(self, plan: Plan, stable: Container[int]) -> None:
        """Find out now what `stage` would find out first, if the memory is there by now."""
        slab = self._client.slab
        if slab is not None and slab.capacity >= plan.room:
            self._compile(plan, stable, slab).to_bytes()

    def stage(
        self,
        plan: Plan,
        stable: Container[int] = frozenset(),
        look: Look | None = None,
        settled: Callable[[Bases], None] | None = None,
    ) -> None:
        """Begin the snapshot of `plan`; afterwards `client.submit` its job, and call `go`.

        A plan with a base needs a `look` at it; `settled` is called, by whatever thread ends it, with what came of it.

        Tensors whose storage is in `stable` (see `storage_ids`) are copied in the background, from `go` on: nothing may
        change them before `wait_staged` returned. The copies of all others are done, or on CUDA queued, when this
        returns.

        Raises SaveError while the save before is still being written.
        """
        self.go()
        self.staged.wait()  # the snapshot before, whose job may have failed already, is not to write into this one
        slab = self._client.arm(plan.room)
        copies = self._compile(plan, stable, slab)
        with torch.no_grad():
            copies.now.copy_host()
            copies.now.start_cuda(torch.cuda.current_stream)
            self._finish_pieces(Pieces(_looks(look, copies.base_now), _nothing_staged), len(copies.base_now))
        end = None if look is None else lambda: self._settle(look, slab, settled)
        if not copies.later and not copies.devices and not copies.base_later:
            self._client.advance(plan.size)
            if end is not None:
                end()
            return
        self.staged.clear()
        self._released.clear()
        ready = [torch.cuda.current_stream(device).record_event() for device in copies.devices]
        groups = [Piece(group.copy_host, group.end) for group in copies.later]
        pieces = [] if copies.devices else [*groups, *_looks(look, copies.base_later)]
        self._pieces = Pieces(pieces, self._client.advance)
        self._begun = lambda: self._finish(copies, ready, look, end)

    def go(self) -> None:
        """Let the background copies begin. Not by `stage` itself: from its first wake-up on the thread competes with
        the caller for the interpreter, up to a switch interval (5 ms) each time; so it is woken last."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._hand_over(begun)

    def wait_staged(self) -> None:
        """Return when stable tensors may be changed. On CUDA that is once the current stream waits for the copies."""
        if not self._released.is_set():
            self.go()
            with torch.no_grad():
                self._pieces.help()
            self._released.wait()
        ends, self._ends = self._ends, []
        for end in ends:
            torch.cuda.current_stream(end.device).wait_event(end)

    def close(self) -> None:
        """Finish what is being copied, let go of the slab."""
        self.go()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            thread.join()
        if self._lookers is not None:
            self._lookers.shutdown()
        self._copies = self._lookers = None
        if self._memory is not None:
            self._memory.release()
            self._memory = None

    def _hand_over(self, work: Callable[[], None]) -> None:
        self._hire()
        self._work.put(work)

    def _hire(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spot-stage", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _settle(self, look: Look, slab: Slab, settled: Callable[[Bases], None] | None) -> None:
        bases = look.finish(slab)
        if settled is not None:
            settled(bases)
        self._client.settle(bases)

    def _finish(
        self, copies: _Copies, ready: list[torch.cuda.Event], look: Look | None, end: Callable[[], None] | None
    ) -> None:
        try:
            with torch.no_grad():
                self._copy(copies, ready, look)
                if end is not None:
                    end()
        except BaseException as error:  # noqa: BLE001 - told to the job's future, the one place that is looked at
            self._client.fail_staging(f"{type(error).__name__}: {error}")
        finally:
            self._released.set()
            self.staged.set()

    def _copy(self, copies: _Copies, ready: list[torch.cuda.Event], look: Look | None) -> None:
        if copies.devices:
            self._copy_from_devices(copies, ready, look)
            return
        if not copies.later:
            self._client.advance(copies.plan.size)
        self._finish_pieces(self._pieces, len(copies.base_later))

    def _finish_pieces(self, pieces: Pieces, looks: int) -> None:
        """With a few more threads where there is something to look at: one core reads less than the memory gives."""
        lookers = min(looks, _MOST_LOOKERS)
        if lookers > 1:
            lookers = min(lookers, (os.cpu_count() or 1) // (2 * local_world_size()))  # half is the training's
        if lookers > 1:
            if self._lookers is None:
                self._lookers = ThreadPoolExecutor(_MOST_LOOKERS, thread_name_prefix="spot-look")
            with contextlib.suppress(RuntimeError):  # the interpreter is on its way out and lends no more threads
                for _ in range(lookers - 1):
                    self._lookers.submit(pieces.help)
        pieces.finish()

    def _copy_from_devices(self, copies: _Copies, ready: list[torch.cuda.Event], look: Look | None) -> None:
        self._memory_of(copies.slab).pin(next(iter(copies.devices)))
        for event in ready:
            self._stream(event.device).wait_event(event)
        done: list[tuple[int, list[torch.cuda.Event]]] = []
        for group in copies.later:
            group.start_cuda(self._stream)
            done.append((group.end, [self._stream(device).record_event() for device in copies.devices]))
        for group in copies.later:
            group.copy_host()
        self._finish_pieces(Pieces(_looks(look, copies.base_later), _nothing_staged), len(copies.base_later))
        # From here on the training may go on, behind these events.
        self._ends = done[-1][1] if done else ready
        self._released.set()
        for end, events in done or [(copies.plan.size, ready)]:
            for event in events:
                event.synchronize()
            self._client.advance(end)

    def _compile(self, plan: Plan, stable: Container[int], slab: Slab) -> _Copies:
        """The lists to copy by; kept as long as plan, stable set and slab are the same objects."""
        old = self._copies
        if old is not None and old.plan is plan and old.slab is slab and (old.stable is stable or old.stable == stable):
            old.to_bytes()
            return old
        memory = self._memory_of(slab)
        memory.trim(len(plan.items) + len(plan.bases))
        now, later = _Group(), list[_Group]()
        with torch.inference_mode(False), torch.no_grad():
            items = sorted((item for item in plan.items if item.nbytes), key=lambda item: item.offset)
            may_wait = [_can_wait(item.tensor) and _storage_id(item.tensor) in stable for item in items]
            worth_it = any(wait and item.nbytes > SMALL_BYTES for wait, item in zip(may_wait, items, strict=True))
            for item, wait in zip(items, may_wait, strict=True):
                tensor, nbytes = item.tensor, item.nbytes
                target = memory.like(tensor, item.offset)
                if not (wait and worth_it):
                    now.add(target, tensor)
                    continue
                if not later or later[-1].nbytes >= min(_FIRST_GROUP_BYTES << (len(later) - 1), _GROUP_BYTES):
                    later.append(_Group())
                later[-1].add(target, tensor)
                later[-1].end = item.offset + nbytes
            if later:
                later[-1].end = plan.size
            base_now: list[_Base] = []
            base_later: list[_Base] = []
            for number, item in enumerate(plan.bases):
                tensor, target = item.tensor, memory.like(item.tensor, plan.base_start + item.offset)
                waits = _can_wait(tensor) and _storage_id(tensor) in stable
                if _lies_as_written(tensor):
                    (base_later if waits else base_now).append((number, bytes_of(tensor), target))
                    continue
                if waits and (not later or later[-1].nbytes >= _GROUP_BYTES):
                    later.append(_Group(plan.size))
                (later[-1] if waits else now).add(target, tensor)
        devices = frozenset(device for group in (now, *later) for device in group.cuda)
        self._copies = _Copies(plan, stable, slab, now, later, devices, base_now, base_later)
        return self._copies

    def _memory_of(self, slab: Slab) -> Pinned:
        if self._memory is None or self._memory.slab is not slab:
            if self._memory is not None:
                self._memory.release()
            self._memory = Pinned(slab)
        return self._memory

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def _looks(look: Look | None, bases: Sequence[_Base]) -> list[Piece]:
    return [] if look is None else [Piece(partial(look.at_source, *base)) for base in bases]


def _nothing_staged(_: int) -> None:
    """Looking at a base puts nothing into the blob."""


def _lies_as_written(tensor: torch.Tensor) -> bool:
    """Its bytes in host memory are those that a copy of it would have."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _can_wait(tensor: torch.Tensor) -> bool:
    """Only of these devices is it known how to order a background copy against the training's own work."""
    return tensor.is_cpu or tensor.is_cuda
