"""A generation comes back bit for bit, into new memory or in place, and damage never gets through."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spot_core.digest import CHUNK_SIZE
from spot_core.errors import (
    ConfigError,
    CorruptShardError,
    FormatError,
    ResumeMismatchError,
    SpotError,
    TornGenerationError,
)
from spot_core.pytorch.catalogue import Catalogue
from spot_core.pytorch.loader import load, read_tensors
from spot_core.pytorch.plan import RankPlan
from spot_core.run import Run
from spot_core.verify import Depth
from spot_core.writer import RawJson

from .same import same
from .saving import Saver, save_one
from .test_state import DTYPES, Opaque, filled


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.open(tmp_path / "run")


def rich_state() -> dict[str, Any]:
    """Every dtype, empty, 0-dim, strided, tied, an array, an object, and a tensor over several digest chunks."""
    weight = torch.randn(6, 5)
    return {
        "dtypes": {str(dtype): filled(dtype, 3, 2) for dtype in DTYPES},
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(5, 7).t(),
        "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "every_other": torch.arange(20)[::2],
        "tied": [weight, weight],
        "array": np.arange(12, dtype=">i4").reshape(3, 4),
        "sparse": torch.eye(2000).to_sparse(),
        "large": torch.randn(CHUNK_SIZE // 4 * 2 + 100),
        "z_first": {"b": 1, "a": (None, float("nan"))},
    }


def rich_local() -> dict[str, Any]:
    return {"rng": torch.get_rng_state(), "blob": bytes(range(256)) * 40, "position": {"epoch": 3}}


def test_everything_comes_back(run: Run) -> None:
    shared, local = rich_state(), rich_local()
    verified = save_one(run, shared, local)
    loaded = load(run.store, verified, rank=0, world=1)
    assert same(loaded.shared, shared)
    assert same(loaded.local, local)
    assert loaded.shared["tied"][0] is loaded.shared["tied"][1]
    assert loaded.shared["image"].stride() == shared["image"].stride()
    assert (loaded.generation.name, loaded.same_world, loaded.missing) == ("000001-000000000001", True, ())


def test_another_store_and_one_thread_make_no_difference() -> None:
    run = Run.open("memory://loader-test")
    shared = rich_state()
    assert same(load(run.store, save_one(run, shared), rank=0, world=1, threads=1).shared, shared)


def test_a_rank_that_did_not_save_has_no_state_of_its_own(run: Run) -> None:
    loaded = load(run.store, save_one(run, {"a": 1}, {"b": 2}), rank=1, world=2)
    assert (loaded.shared, loaded.local, loaded.same_world) == ({"a": 1}, None, False)


def test_the_states_of_other_ranks_can_be_read(run: Run) -> None:
    """A rank that did not save has rank 0's at hand, and any rank can read any other's."""
    local = rich_local()
    verified = save_one(run, {"a": 1}, local)
    for rank in (0, 1):
        loaded = load(run.store, verified, rank=rank, world=2)
        assert same(loaded.nearest, local)
        assert same(loaded.local_of(0), local)
        assert loaded.world_size == 1
        with pytest.raises(KeyError, match="no rank 1"):
            loaded.local_of(1)


def test_a_template_is_filled_in_place(run: Run) -> None:
    module = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    saved = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    verified = save_one(run, {"model": module.state_dict(), "lr": 0.5})
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.zero_()
    template = {"model": {**module.state_dict(), "new": torch.ones(2)}}
    loaded = load(run.store, verified, rank=0, world=1, template=template)
    assert same(dict(module.state_dict()), saved)
    assert loaded.shared["model"]["0.weight"].data_ptr() == module[0].weight.data_ptr()
    assert loaded.shared["lr"] == 0.5
    assert loaded.missing == ("model.new",)


def test_a_template_may_convert_and_have_any_strides(run: Run) -> None:
    verified = save_one(run, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4.0)})
    a, b = torch.zeros(3, 2).t(), torch.zeros(4, dtype=torch.float64)
    load(run.store, verified, rank=0, world=1, template={"a": a, "b": b})
    assert a.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert b.tolist() == [0, 1, 2, 3]


def test_tied_weights_may_be_loaded_untied_and_by_either_name(run: Run) -> None:
    weight = torch.randn(4, 4)
    verified = save_one(run, {"embed": weight, "head": weight})
    untied = {"embed": torch.zeros(4, 4), "head": torch.zeros(4, 4)}
    load(run.store, verified, rank=0, world=1, template=untied)
    assert same(untied, {"embed": weight, "head": weight})
    head = torch.zeros(4, 4)
    loaded = load(run.store, verified, rank=0, world=1, template={"head": head})
    assert torch.equal(head, weight)
    assert loaded.shared["embed"].data_ptr() == head.data_ptr()


def test_a_template_of_another_shape_is_another_model(run: Run) -> None:
    verified = save_one(run, {"a": torch.zeros(3)})
    with pytest.raises(ResumeMismatchError, match=r"000001-000000000001.*a"):
        load(run.store, verified, rank=0, world=1, template={"a": torch.zeros(4)})


def blob_of(run: Run) -> Path:
    return next(Path(run.uri.removeprefix("file://")).glob("generations/*/*.blob"))


@pytest.mark.parametrize("place", ["first byte", "middle", "last byte"])
@pytest.mark.parametrize("template", [False, True], ids=["new", "in place"])
def test_one_wrong_bit_is_found_and_named(run: Run, place: str, template: bool) -> None:
    state = {"a": torch.randn(CHUNK_SIZE // 4 + 1000), "b": torch.zeros(16)}
    verified = save_one(run, state)
    blob = blob_of(run)
    data = bytearray(blob.read_bytes())
    at = {"first byte": 0, "middle": CHUNK_SIZE - 1, "last byte": len(data) - 1}[place]
    data[at] ^= 4
    blob.write_bytes(data)
    with pytest.raises(CorruptShardError) as caught:
        load(run.store, verified, rank=0, world=1, template=state if template else None)
    number = at // CHUNK_SIZE
    for part in (run.uri, "000001-000000000001", "rank 0", f"chunk {number}", blob.name):
        assert part in str(caught.value)


def test_only_what_is_needed_is_read_but_all_of_that_is_checked(run: Run) -> None:
    size = CHUNK_SIZE // 4
    verified = save_one(run, {"a": torch.ones(size), "b": torch.zeros(size)}, {"c": torch.ones(size)})
    blob = blob_of(run)
    data = bytearray(blob.read_bytes())
    data[2 * CHUNK_SIZE + 5] ^= 1  # in this rank's own state
    blob.write_bytes(data)
    catalogue = Catalogue.read(run.store, verified)
    assert read_tensors(catalogue, ["b"])["b"].sum() == 0
    with pytest.raises(CorruptShardError, match="chunk 2"):
        load(run.store, verified, rank=0, world=1)


def test_a_blob_cut_short_or_gone_is_told_apart_from_a_store_that_fails(run: Run) -> None:
    verified = save_one(run, {"a": torch.randn(100_000)})
    blob = blob_of(run)
    data = blob.read_bytes()
    blob.write_bytes(data[:-1])
    with pytest.raises(CorruptShardError, match=r"chunk 0 .*rank 0, is cut short"):
        load(run.store, verified, rank=0, world=1)
    blob.unlink()
    with pytest.raises(TornGenerationError, match="missing"):
        load(run.store, verified, rank=0, world=1)
    blob.with_name(blob.name.replace(".blob", ".index.json")).unlink()
    with pytest.raises(TornGenerationError, match="missing"):
        load(run.store, verified, rank=0, world=1)


def test_a_changed_index_is_refused(run: Run) -> None:
    verified = save_one(run, {"a": torch.zeros(4), "n": 12345})
    index = blob_of(run).with_name(blob_of(run).name.replace(".blob", ".index.json"))
    index.write_bytes(index.read_bytes().replace(b"12345", b"12346"))
    with pytest.raises(CorruptShardError, match="index of rank 0"):
        load(run.store, verified, rank=0, world=1)


def test_a_generation_without_a_training_state_is_a_format_error(run: Run) -> None:
    opened = run.claim().begin(1)
    committed = opened.seal([opened.write(0, {"x": b"1"})], world_size=1).commit({})
    with pytest.raises(FormatError, match="no training state"):
        load(run.store, run.verify(committed, Depth.SIZES), rank=0, world=1)


def test_a_tensor_with_a_gap_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = RankPlan.index

    def with_a_gap(plan: RankPlan, *trees: Any) -> dict[str, Any]:
        index = original(plan, *trees)
        garbled = json.loads(index["tensors"].text.replace(b'"shape":[3]', b'"shape":[4]'))
        return {**index, "tensors": RawJson(lambda: garbled)}

    monkeypatch.setattr(RankPlan, "index", with_a_gap)
    with pytest.raises(FormatError, match="do not cover 'a'"):
        load(run.store, save_one(run, {"a": torch.zeros(3)}), rank=0, world=1)


def test_pickles_load_only_when_allowed_and_only_with_a_good_digest(run: Run) -> None:
    large = Opaque(3)
    large.padding = bytes(10_000)
    verified = save_one(run, {"o": large}, allow_pickle=True)
    assert load(run.store, verified, rank=0, world=1, allow_pickle=True).shared["o"].value == 3
    with pytest.raises(ConfigError, match="allow_pickle"):
        load(run.store, verified, rank=0, world=1)

    blob = blob_of(run)
    evil = pickle.dumps(Bomb())
    blob.write_bytes(evil + blob.read_bytes()[len(evil) :])
    with pytest.raises(CorruptShardError):
        load(run.store, verified, rank=0, world=1, allow_pickle=True)
    assert not Bomb.went_off


class Bomb:
    went_off = False

    def __reduce__(self) -> tuple[object, ...]:
        return (setattr, (Bomb, "went_off", True))


def test_many_small_tensors_and_large_ones_share_chunks(run: Run) -> None:
    state = {f"t{i}": torch.full((1 + i % 7,), float(i)) for i in range(3000)}
    state["big"] = torch.randn(CHUNK_SIZE // 2)
    verified = save_one(run, state)
    assert same(load(run.store, verified, rank=0, world=1).shared, state)
    some = {"t5": torch.zeros(6), "t2999": torch.zeros(1 + 2999 % 7), "big": torch.zeros(CHUNK_SIZE // 2)}
    load(run.store, verified, rank=0, world=1, template=some)
    assert same(some, {name: state[name] for name in some})


def test_a_tensor_changed_after_the_save_is_not_in_it_and_later_saves_differ(run: Run) -> None:
    saver = Saver(run)
    tensor, generations = torch.zeros(1000), []
    for step in range(3):
        generations.append(saver.save(step, {"t": tensor})[0])
        tensor += 1
    saver.close()
    for step, committed in enumerate(generations):
        loaded = load(run.store, run.verify(committed, Depth.DIGESTS), rank=0, world=1)
        assert torch.equal(loaded.shared["t"], torch.full((1000,), float(step)))


def test_an_error_of_the_store_is_not_damage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    verified = save_one(run, {"a": torch.zeros(1000)})
    failure = SpotError("the disk is on fire")

    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(run.store, "get_ranges", fail)
    with pytest.raises(SpotError) as caught:
        load(run.store, verified, rank=0, world=1)
    assert caught.value is failure
