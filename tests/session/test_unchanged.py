"""Tensors that do not change are written once: what is on the store, what is read back, and when they do change.

Mutants that these tests were seen to catch: see at each test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spot_core import Depth, Retention, Run, SaveError, StoreError, layout
from spot_core.config import Settings
from spot_core.generation import Committed
from spot_core.pytorch import bases
from spot_core.pytorch.export import export
from spot_core.pytorch.plan import SMALL_BYTES
from spot_core.pytorch.reader import SpotStorageReader
from spot_core.pytorch.session import Session
from spot_core.store import open_store
from spot_core.testing import FailingStore

MANY = SMALL_BYTES // 4


class Model:
    """Four frozen tensors, of which one is not contiguous and one small, and two that are trained."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.frozen = {f"f{i}": torch.randn(2 * MANY + 4 * i) for i in range(3)}
        self.frozen["turned"] = torch.randn(200, 300).t()
        self.frozen["small"] = torch.randn(10)
        self.trained = {"lora": torch.randn(500), "wide": torch.randn(MANY + 1)}

    def step(self) -> None:
        for tensor in self.trained.values():
            tensor.mul_(0.9).add_(1)

    def state(self) -> dict[str, torch.Tensor]:
        # Frozen and trained ones take turns, as in a module.
        names = sorted([*self.frozen, *self.trained])
        return {name: (self.frozen | self.trained)[name] for name in names}

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.state().items()}

    def take_up(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.open(tmp_path / "run")


def session_of(run: Any, **settings: Any) -> Session:
    settings = {"sources": "none", "interval": "1h", "writer": "thread", "preflight": False, **settings}
    return Session(Run.open(run) if not isinstance(run, Run) else run, Settings(**settings))


def save(session: Session, model: Model, step: int, *, stable: bool = True, wait: bool = True) -> Committed | None:
    session.save(
        step,
        shared={"model": model.state()},
        local={"n": step},
        stable=model.state().values() if stable else (),
        frozen=model.frozen.values(),
    )
    session.wait_staged()
    return session.drain() if wait else None


def begun(session: Session, model: Model) -> Session:
    found = session.resume()
    if found is not None:
        model.take_up(found.state.shared["model"])
    session.start()
    return session


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def loaded(run: Run, name: str) -> dict[str, torch.Tensor]:
    """By the reader for plain users of DCP, all bytes checked."""
    state = {"model": {key: torch.empty_like(value) for key, value in Model().state().items()}}
    torch.distributed.checkpoint.load(state, storage_reader=SpotStorageReader(run, name), no_dist=True)
    return state["model"]


def base_keys(run: Run) -> list[str]:
    return sorted(info.key for info in run.store.list(layout.GENERATIONS) if layout.is_base(info.key))


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize("stable", [True, False], ids=["in the background", "at once"])
def test_the_frozen_base_is_written_once(run: Run, writer: str, stable: bool) -> None:
    """Over saves and lives. Caught: no look at the digests; a base that is always written."""
    model, states = Model(), {}
    big = sum(tensor.nbytes for tensor in model.frozen.values()) - model.frozen["small"].nbytes
    for life in (1, 2):
        with begun(session_of(run, writer=writer), model) as session:
            for number in (1, 2, 3):
                model.step()
                step = 10 * life + number
                committed = save(session, model, step, stable=stable)
                assert committed is not None
                states[committed.id.name] = model.copy()
                first = (life, number) == (1, 1)
                assert bool(committed.manifest.referred) is not first
                assert committed.manifest.own_size < (big if not first else 2 * big) + 400_000
                if not first:
                    assert committed.manifest.own_size < 400_000
                    assert committed.manifest.size - committed.manifest.own_size >= big
    kept = run.discover().generations
    assert [committed.id.step for committed in kept] == [23, 22, 21]
    assert base_keys(run) == ["generations/000001-000000000011/a0-r00000.base.blob"]
    for committed in kept:
        run.verify(committed, Depth.DIGESTS)
        assert same(loaded(run, committed.id.name), states[committed.id.name])


def _by_data(tensor: torch.Tensor) -> None:
    tensor.data[7] += 1


def _by_fused_adamw(tensor: torch.Tensor) -> None:
    before = tensor._version
    tensor.requires_grad_().grad = torch.ones_like(tensor)
    torch.optim.AdamW([tensor], fused=True).step()
    tensor.requires_grad_(False).grad = None
    assert tensor._version == before, "the premise: versions say nothing"


def _one_bit(tensor: torch.Tensor) -> None:
    tensor.numpy().view("uint8")[-1] ^= 1


@pytest.mark.parametrize("change", [_by_data, _by_fused_adamw, _one_bit])
@pytest.mark.parametrize("stable", [True, False], ids=["in the background", "at once"])
def test_a_change_behind_everybodys_back_is_noticed(run: Run, change: Callable[[Any], None], stable: bool) -> None:
    """Only the tensor that changed is written again; the next save refers to both. Caught: a digest that is not
    compared, or compared for the first tensor alone."""
    model = Model()
    with begun(session_of(run), model) as session:
        first = save(session, model, 1, stable=stable)
        change(model.frozen["f1"])
        second, changed = save(session, model, 2, stable=stable), model.copy()
        third = save(session, model, 3, stable=stable)
    assert first is not None
    assert second is not None
    assert third is not None
    (old,) = first.manifest.bases
    assert second.manifest.referred == (old,)
    (new,) = (ref for ref in second.manifest.bases if ref != old)
    assert new.size < model.frozen["f1"].nbytes + 100
    assert set(third.manifest.bases) == {old, new}
    assert set(third.manifest.referred) == {old, new}
    assert same(loaded(run, second.id.name), changed)
    assert same(loaded(run, third.id.name), changed)
    assert not same(loaded(run, first.id.name), changed)


def test_several_threads_look_at_a_large_base(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    model = Model()
    model.frozen |= {f"more{i}": torch.randn(MANY + i) for i in range(40)}
    with begun(session_of(run), model) as session:
        for step in range(1, 4):
            model.frozen[f"more{7 * step}"].add_(1)
            model.frozen["f2"].mul_(1 + (step == 3))
            committed = save(session, model, step)
            assert committed is not None
            state = {"model": {key: torch.empty_like(value) for key, value in model.state().items()}}
            torch.distributed.checkpoint.load(state, storage_reader=SpotStorageReader(run), no_dist=True)
            assert same(state["model"], model.state())
    assert committed.manifest.own_size < 4 * (MANY + 2 * MANY) * 4


def test_a_change_of_what_is_not_contiguous_is_noticed(run: Run) -> None:
    model = Model()
    with begun(session_of(run), model) as session:
        save(session, model, 1)
        model.frozen["turned"][3, 4] += 1
        second = save(session, model, 2)
    assert second is not None
    assert second.manifest.own_size > model.frozen["turned"].nbytes
    assert same(loaded(run, second.id.name), model.state())


def test_what_changes_with_every_save_is_not_expected_to_stay_any_more(run: Run) -> None:
    """A teacher that is averaged requires no gradient and changes all the same."""
    model = Model()
    with begun(session_of(run), model) as session:
        planned = []
        for step in range(1, 6):
            model.frozen["f1"].add_(1)
            committed = save(session, model, step)
            assert committed is not None
            assert same(loaded(run, committed.id.name), model.state())
            planned.append("f1" in str(session._live.baseline.mutable))  # type: ignore[union-attr]
        assert planned == [False, False, True, True, True]
        assert len(committed.manifest.bases) == 1


def test_a_save_that_failed_is_not_referred_to(tmp_path: Path) -> None:
    """Caught: a baseline that takes what was written for what was committed."""
    fails = {"on": False}
    store = FailingStore(
        open_store(tmp_path / "run"),
        lambda i, verb, key: (
            StoreError("disk full")
            if fails["on"] and verb == "put_if_absent" and key.endswith("COMMIT.json")
            else None
        ),
    )
    run, model = Run.open(tmp_path / "run"), Model()
    with begun(session_of(store), model) as session:
        fails["on"] = True
        save(session, model, 1)
        fails["on"] = False
        second = save(session, model, 2)
        assert second is not None
        assert second.manifest.referred == ()
        model.frozen["f0"].add_(1)
        fails["on"] = True
        save(session, model, 3)
        fails["on"] = False
        fourth = save(session, model, 4)
    assert fourth is not None
    assert [layout.generation_of(ref.key) for ref in fourth.manifest.referred] == [second.id]
    assert same(loaded(run, fourth.id.name), model.state())
    assert {layout.generation_of(ref.key) for ref in fourth.manifest.bases} == {second.id, fourth.id}


def test_two_saves_of_which_nobody_waits_for_the_first(run: Run) -> None:
    model = Model()
    with begun(session_of(run), model) as session:
        for step in range(1, 5):
            model.step()
            save(session, model, step, wait=False)
        session.drain()
    newest = run.discover().generations[0]
    assert len(newest.manifest.referred) == 1
    assert same(loaded(run, newest.id.name), model.state())


def test_the_rest_thaws_and_grows(run: Run) -> None:
    """Layers are unfrozen one by one: what is still frozen stays referred to while half of its blob is of use."""
    model = Model()
    with begun(session_of(run), model) as session:
        save(session, model, 1)
        for step, name in enumerate(["f0", "turned", "f1"], start=2):
            model.trained[name] = model.frozen.pop(name)
            model.step()
            committed = save(session, model, step)
            assert committed is not None
            assert same(loaded(run, committed.id.name), model.state())
            origins = {layout.generation_of(ref.key).step for ref in committed.manifest.bases}  # type: ignore[union-attr]
            assert origins == {1 if step == 2 else step}


def test_blobs_of_little_use_are_let_go(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save changes another tensor: the references do not pile up."""
    monkeypatch.setattr(bases, "MOST_BLOBS", 2)
    model = Model()
    model.frozen = {f"f{i}": torch.randn(MANY + i) for i in range(6)}
    with begun(session_of(run, keep=1), model) as session:
        for step in range(1, 7):
            model.frozen[f"f{step - 1}"].add_(1)
            committed = save(session, model, step)
            assert committed is not None
            assert len(committed.manifest.bases) <= 3
            found = run.verify(committed, Depth.DIGESTS)
            assert found.committed == committed
    assert len(base_keys(run)) <= 3


def test_pruning_by_hand_and_a_new_life(run: Run) -> None:
    model = Model()
    with begun(session_of(run), model) as session:
        save(session, model, 1)
        model.step()
        save(session, model, 2)
    writer = run.claim()
    writer.prune(Retention(1))
    with begun(session_of(run), model) as session:
        model.step()
        third = save(session, model, 3)
    assert third is not None
    assert [layout.generation_of(ref.key).step for ref in third.manifest.referred] == [1]  # type: ignore[union-attr]
    assert same(loaded(run, third.id.name), model.state())


def test_damage_in_the_base_is_noticed_at_the_load(run: Run) -> None:
    model = Model()
    with begun(session_of(run), model) as session:
        model.frozen["f0"].add_(1)
        alone = save(session, model, 1)
        for name in model.frozen:
            model.frozen[name].add_(1)
        save(session, model, 2)
        save(session, model, 3)
    newest = run.discover().generations[0]
    (ref,) = newest.manifest.bases
    path = Path(run.uri, ref.key)
    data = bytearray(path.read_bytes())
    data[70_000] ^= 1
    path.write_bytes(data)
    with session_of(run) as session:
        found = session.resume()
        assert found is not None
        assert alone is not None
        assert found.generation == alone.id.name


@pytest.mark.parametrize("fmt", ["torch", "safetensors", "dcp"])
def test_an_export_resolves_references(run: Run, tmp_path: Path, fmt: str) -> None:
    model = Model()
    with begun(session_of(run), model) as session:
        save(session, model, 1)
        model.step()
        save(session, model, 2)
    out = tmp_path / "out"
    export(run, None, out, fmt, prefix="model.")
    if fmt == "torch":
        state = torch.load(out, weights_only=True)
    elif fmt == "safetensors":
        from safetensors.torch import load_file

        state = load_file(out)
    else:
        state = {name: torch.empty_like(tensor) for name, tensor in model.state().items()}
        torch.distributed.checkpoint.load(state, checkpoint_id=out, no_dist=True)
    assert same(state, model.state())


def test_through_a_local_tier_the_base_is_sent_once(run: Run, tmp_path: Path) -> None:
    """Locally every generation is whole; on its way to the store the base is recognised."""
    model = Model()
    with begun(session_of(run, local=str(tmp_path / "local"), writer="process"), model) as session:
        for step in (1, 2, 3):
            model.step()
            committed = save(session, model, step)
            assert committed is not None
            assert bool(committed.manifest.referred) is (step > 1)
            assert same(loaded(run, committed.id.name), model.state())
    (tier,) = (tmp_path / "local").iterdir()
    for committed in Run.open(tier).discover().generations:
        assert committed.manifest.referred == ()
    assert base_keys(run) == ["generations/000001-000000000001/a0-r00000.base.blob"]
    with begun(session_of(run, local=str(tmp_path / "local")), model) as session:
        before = model.copy()
        model.step()
        assert not same(before, model.state())
        committed = save(session, model, 4)
        assert committed is not None
    assert same(loaded(run, committed.id.name), model.state())


def test_a_writer_that_dies_costs_the_base_once_more(run: Run) -> None:
    model = Model()
    with begun(session_of(run, writer="process"), model) as session:
        save(session, model, 1)
        live = session._live
        assert live is not None
        live.client.abandon()
        second = save(session, model, 2)
        assert second is not None
        live.client.base_digests = ("", ())
        model.frozen["f0"].add_(1)
        save(session, model, 3)
        fourth = save(session, model, 4)
        assert fourth is not None
        assert same(loaded(run, fourth.id.name), model.state())


def test_a_part_may_not_refer_to_what_nobody_holds(run: Run) -> None:
    """The coordinator's own look at what ranks report."""
    model = Model()
    with begun(session_of(run, on_save_error="raise"), model) as session:
        save(session, model, 1)
        assert session._lead is not None
        session._lead.committer.writer._before = None
        with pytest.raises(SaveError, match="does not hold"):
            save(session, model, 2)
