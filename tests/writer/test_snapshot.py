"""What reaches the file is the state at the save point: every dtype and layout, whatever changes afterwards."""

from __future__ import annotations

import threading

import pytest
import torch

from spot_core.errors import SaveError
from spot_core.pytorch import stage
from spot_core.pytorch.stage import Stager, storage_ids
from spot_core.store import Store
from spot_core.writer import WriteJob, WriterClient

from ._snapshot import blob_bytes, plan_of, raw, save, saved, target

WAIT = 60

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint64,
]


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, so that NaN payloads and subnormals are among them (bool: only 0 and 1 are values)."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def layouts(dtype: torch.dtype) -> list[torch.Tensor]:
    base = random(dtype, 120, 80)
    return [
        random(dtype, 3, 5),
        random(dtype, 1)[0],  # 0-dim
        random(dtype, 0, 7),  # empty
        base,
        random(dtype, 90, 110).t(),
        base[::2, 1::3],  # strided, shares memory with `base`
        random(dtype, 1, 64).expand(70, 64),
        random(dtype, 4, 6, 30, 31).permute(3, 1, 0, 2),
    ]


@pytest.mark.parametrize("stable", [True, False], ids=["stable", "immediate"])
def test_every_dtype_and_layout_arrives_bit_for_bit(
    client: WriterClient, stager: Stager, store: Store, stable: bool
) -> None:
    tensors = [tensor for dtype in DTYPES for tensor in layouts(dtype)]
    tensors.append(random(torch.complex64, 60, 60).conj())
    tensors.append(random(torch.complex64, 60, 60).conj().imag)  # negative bit set
    tensors.append(torch.nn.Parameter(torch.randn(50, 50)))
    plan = plan_of(tensors)
    future, _ = save(client, stager, plan, storage_ids(tensors) if stable else (), 1)
    stager.wait_staged()
    for item, found in zip(plan.items, saved(store, future.result(WAIT), plan), strict=True):
        assert found == raw(item.tensor), f"{item.tensor.dtype} {tuple(item.tensor.shape)} {item.tensor.stride()}"


def test_a_change_right_after_the_save_call_does_not_reach_the_file(
    client: WriterClient, stager: Stager, store: Store
) -> None:
    tensors = [torch.full((n,), 1.0) for n in (1, 1000, 5_000_000)]
    plan = plan_of(tensors)
    future, _ = save(client, stager, plan, (), 1)
    for tensor in tensors:
        tensor.fill_(2.0)
    found = saved(store, future.result(WAIT), plan)
    assert [set(data) for data in found] == [set(raw(torch.full((1,), 1.0)))] * 3


@pytest.mark.parametrize("stable", [True, False], ids=["stable", "immediate"])
@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "unprepared"])
def test_small_tensors_of_a_kept_plan_arrive_bit_for_bit_at_every_save(
    client: WriterClient, stager: Stager, store: Store, prepared: bool, stable: bool
) -> None:
    """From the second save on, and after `prepare`, they are copied as bytes and not as tensors."""
    # An expanded one cannot be written to.
    found = [tensor for dtype in DTYPES for tensor in layouts(dtype) if tensor.nbytes and 0 not in tensor.stride()]
    tensors = [tensor for tensor in found if tensor.nbytes <= stage.SMALL_BYTES]
    tensors += [tensor[:5, :3] for tensor in found if tensor.ndim == 2 and len(tensor) > 5]
    tensors.append(random(torch.complex64, 6, 6).conj())
    tensors.append(random(torch.complex64, 6, 6).conj().imag)  # negative bit set
    tensors.append(torch.nn.Parameter(torch.randn(5, 5)))
    tensors.insert(9, torch.randn(stage.SMALL_BYTES))  # without a large one stable ones are copied at once as well
    plan, waits = plan_of(tensors), storage_ids(tensors if stable else [])
    client.reserve(plan.room)
    if prepared:
        stager.prepare(plan, waits)
    for step in range(4):
        future, _ = save(client, stager, plan, waits, step)
        stager.wait_staged()
        before = [raw(tensor) for tensor in tensors]
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(random(tensor.dtype, *tensor.shape))
        for item, old, now in zip(plan.items, before, saved(store, future.result(WAIT), plan), strict=True):
            assert now == old, f"{step}: {item.tensor.dtype} {tuple(item.tensor.shape)} {item.tensor.stride()}"


@pytest.mark.parametrize("size", [5000, 40], ids=["beside a large one", "alone"])
def test_small_stable_tensors_wait_with_the_large_ones(
    client: WriterClient, stager: Stager, store: Store, size: int
) -> None:
    """A change before `go` shows whether a tensor was copied within `stage`."""
    weight, bias, count = torch.zeros(size), torch.zeros(3), torch.zeros(1)
    plan, stable = plan_of([bias, weight, count]), storage_ids([weight, bias])
    for step in range(1, 4):
        stager.stage(plan, stable)
        for tensor in (weight, bias, count):
            tensor.fill_(step)
        future = client.submit(WriteJob(0, target(step), plan.size, {}))
        stager.go()
        stager.wait_staged()
        late, at_once = float(step), float(step - 1)
        wanted = [late, late, at_once] if size > 40 else [at_once] * 3
        found = saved(store, future.result(WAIT), plan)
        assert found == [raw(torch.full((n,), value)) for n, value in zip((3, size, 1), wanted, strict=True)]


def test_stable_tensors_may_change_after_wait_staged(client: WriterClient, stager: Stager, store: Store) -> None:
    tensors = [torch.full((1_000_000,), float(k)) for k in range(30)]
    plan, stable = plan_of(tensors), storage_ids(tensors)
    for step in range(3):
        before = [raw(tensor) for tensor in tensors]
        future, _ = save(client, stager, plan, stable, step)
        stager.wait_staged()
        for tensor in tensors:
            tensor.add_(100.0)
        assert saved(store, future.result(WAIT), plan) == before


def test_stable_tensors_are_copied_in_the_background_and_awaited(
    client: WriterClient, stager: Stager, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stage` returns before the copy of a stable tensor; `wait_staged` does not."""
    copied, begun, go = [], threading.Event(), threading.Event()
    copy = stage.foreach_copy

    def held_back(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        begun.set()
        assert go.wait(WAIT)
        copied.append(len(sources))
        copy(targets, sources)

    monkeypatch.setattr(stage, "foreach_copy", held_back)
    tensors = [torch.randn(5000), torch.randn(5000)]
    future, _ = save(client, stager, plan_of(tensors), storage_ids(tensors), 1)
    assert not copied
    assert not stager.staged.is_set()
    assert begun.wait(WAIT)
    threading.Timer(0.05, go.set).start()
    stager.wait_staged()
    assert copied == [2]
    future.result(WAIT)
    assert stager.staged.is_set()


def test_who_waits_for_the_copies_makes_those_that_nobody_has_begun(
    client: WriterClient, stager: Stager, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one group that the background thread has in hand is all that it waits for."""
    by_loop, begun, go = [], threading.Event(), threading.Event()
    copy = stage.foreach_copy

    def held_back(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if threading.current_thread() is threading.main_thread():
            by_loop.append(len(sources))
            if len(by_loop) == 2:
                go.set()
        else:
            begun.set()
            assert go.wait(WAIT)
        copy(targets, sources)

    monkeypatch.setattr(stage, "foreach_copy", held_back)
    monkeypatch.setattr(stage, "_FIRST_GROUP_BYTES", 1)
    monkeypatch.setattr(stage, "_GROUP_BYTES", 1)
    tensors = [torch.full((2000,), float(n)) for n in range(3)]
    plan = plan_of(tensors)
    before = [raw(tensor) for tensor in tensors]
    future, _ = save(client, stager, plan, storage_ids(tensors), 1)
    assert begun.wait(WAIT)
    stager.wait_staged()
    assert by_loop == [1, 1]
    for tensor in tensors:
        tensor.fill_(9.0)
    assert saved(store, future.result(WAIT), plan) == before


def test_buffers_that_forward_changes_are_taken_at_the_save_point(
    client: WriterClient, stager: Stager, store: Store
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.BatchNorm1d(2048))
    tensors = list(model.state_dict().values())
    plan = plan_of(tensors)
    before = [raw(tensor) for tensor in tensors]
    future, _ = save(client, stager, plan, storage_ids(model.parameters()), 1)
    model(torch.randn(32, 64))
    stager.wait_staged()
    assert raw(model[1].running_mean) != before[2]
    assert saved(store, future.result(WAIT), plan) == before


def test_successive_saves_differ_as_the_weights_do(client: WriterClient, stager: Stager, store: Store) -> None:
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    states = []
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 100)).square().sum().backward()
        stager.wait_staged()
        optimizer.step()
        tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
        plan = plan_of(tensors)
        states.append([raw(tensor) for tensor in tensors])
        future, _ = save(client, stager, plan, storage_ids(tensors), step)
        stager.wait_staged()
        assert saved(store, future.result(WAIT), plan) == states[-1]
    assert states[0] != states[1] != states[2]


@pytest.mark.parametrize("size", [30, 3000], ids=["small", "large"])
def test_a_kept_plan_reads_the_tensors_present_storage(
    client: WriterClient, stager: Stager, store: Store, size: int
) -> None:
    """`tensor.data = ...` gives a parameter another storage; a plan that is used again must not copy the old one."""
    parameter = torch.nn.Parameter(torch.zeros(size))
    plan, stable = plan_of([parameter]), storage_ids([parameter])
    for value in (1.0, 2.0, 3.0, 4.0):
        parameter.data = torch.full((size,), value)
        future, _ = save(client, stager, plan, stable, int(value))
        stager.wait_staged()
        assert saved(store, future.result(WAIT), plan) == [raw(parameter)]


def test_another_plan_copies_other_tensors(client: WriterClient, stager: Stager, store: Store) -> None:
    for step in range(2):
        tensors = [torch.full((2000,), float(step))]
        plan = plan_of(tensors)
        future, _ = save(client, stager, plan, (), step)
        assert saved(store, future.result(WAIT), plan) == [raw(tensors[0])]


def test_a_growing_state_gets_a_larger_slab(client: WriterClient, stager: Stager, store: Store) -> None:
    stager.reserve(1000)
    # Not by the first save, which would wait for its start.
    assert "spot-stage" in {thread.name for thread in threading.enumerate()}
    for step, count in enumerate((200, 3_000_000, 100)):
        tensors = [torch.randn(count), torch.arange(count)]
        plan = plan_of(tensors)
        future, _ = save(client, stager, plan, storage_ids(tensors), step)
        stager.wait_staged()
        assert saved(store, future.result(WAIT), plan) == [raw(tensor) for tensor in tensors]


def test_nothing_to_write_gives_an_index_and_no_blob(client: WriterClient, stager: Stager, store: Store) -> None:
    future, where = save(client, stager, plan_of([torch.empty(0)]), (), 1, tree={"a": 1})
    part = future.result(WAIT)
    assert part.blob is None
    assert blob_bytes(store, part) == b""
    assert store.stat(where.blob_key) is None


def test_one_snapshot_at_a_time(client: WriterClient, stager: Stager, store: Store) -> None:
    slab = client.arm(10)
    future = client.submit(WriteJob(0, target(1), 10, {}))
    with pytest.raises(SaveError, match="still being written"):
        stager.stage(plan_of([torch.zeros(3)]))
    with pytest.raises(SaveError, match="armed"):
        client.submit(WriteJob(0, target(2), 10, {}))
    slab.data[:10] = b"0123456789"
    client.advance(10)
    assert blob_bytes(store, future.result(WAIT)) == b"0123456789"


def test_a_copy_that_fails_fails_the_save_and_nothing_else(
    client: WriterClient, stager: Stager, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.randn(5000)]
    plan, stable = plan_of(tensors), storage_ids(tensors)

    def broken(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(stage, "foreach_copy", broken)
        future, where = save(client, stager, plan, stable, 1)
        stager.wait_staged()
        with pytest.raises(SaveError, match="device lost"):
            future.result(WAIT)
    assert store.stat(where.blob_key) is None
    future, _ = save(client, stager, plan, stable, 2)
    stager.wait_staged()
    assert saved(store, future.result(WAIT), plan) == [raw(tensors[0])]


def test_snapshots_under_inference_mode(client: WriterClient, stager: Stager, store: Store) -> None:
    with torch.inference_mode():
        tensors = [torch.randn(2000), torch.randn(3)]
        plan = plan_of(tensors)
        future, _ = save(client, stager, plan, storage_ids(tensors), 1)
        stager.wait_staged()
    assert saved(store, future.result(WAIT), plan) == [raw(tensor.clone()) for tensor in tensors]


@pytest.mark.parametrize("index", [{"tree": object()}, {"tree": float("nan")}, {"chunks": {}}])
def test_an_index_that_cannot_be_written_fails_the_save(
    client: WriterClient, stager: Stager, store: Store, index: dict[str, object]
) -> None:
    future, where = save(client, stager, plan_of([torch.zeros(10)]), (), 1, **index)
    with pytest.raises(SaveError, match="rank 0"):
        future.result(WAIT)
    assert store.stat(where.index_key) is None
    future, _ = save(client, stager, plan_of([torch.zeros(10)]), (), 2)
    assert future.result(WAIT).blob is not None


def test_a_snapshot_that_fails_while_its_job_is_on_the_way(client: WriterClient, store: Store) -> None:
    """The job's index is still being encoded when the failure is told: the writer must hear of it after the job."""
    client.arm(10)
    future = client.submit(WriteJob(0, target(1), 10, {"tree": list(range(300_000))}))
    client.fail_staging("device lost")
    with pytest.raises(SaveError, match="device lost"):
        future.result(WAIT)
