"""The private names of torch in spot_core/pytorch/_private.py still exist and still mean what we take them for."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.distributed as dist

from spot_core.pytorch import _private


def test_storage_identity_tells_storages_apart_even_empty_ones() -> None:
    tensor = torch.arange(6)
    assert _private.storage_identity(tensor) == _private.storage_identity(tensor[2:])
    assert _private.storage_identity(tensor) != _private.storage_identity(tensor.clone())
    one, other = torch.empty(0), torch.empty(0)
    assert one.data_ptr() == other.data_ptr() == 0  # why the public way will not do
    assert _private.storage_identity(one) != _private.storage_identity(other)


def test_foreach_copy_copies_each() -> None:
    targets, sources = [torch.zeros(2), torch.zeros(3, dtype=torch.int64)], [torch.ones(2), torch.arange(3)]
    _private.foreach_copy(targets, sources)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_sharded_tensor_is_still_where_it_was() -> None:
    cls = _private.sharded_tensor_class()
    assert cls is not None
    assert cls.__name__ == "ShardedTensor"
    assert hasattr(cls, "local_shards")
    assert hasattr(cls, "metadata")


def test_named_tuples_name_their_fields() -> None:
    assert _private.namedtuple_fields(collections.namedtuple("P", "x y")) == ("x", "y")
    assert _private.namedtuple_fields(tuple) is None
    assert _private.namedtuple_fields(torch.Size) is None
    assert _private.namedtuple_fields(type("NoTuple", (), {"_fields": ("x",)})) is None


def test_the_default_store_can_be_cloned(tmp_path: object) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        clone = _private.clone_default_store()
        clone.set("key", "value")
        assert clone.get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_a_stream_tells_what_it_was_made_of() -> None:
    datasets = pytest.importorskip("datasets")
    plain = datasets.Dataset.from_dict({"i": [1, 2, 3]}).to_iterable_dataset()
    assert not _private.holds_examples_back(plain.map(lambda row: row))
    assert _private.holds_examples_back(plain.shuffle(buffer_size=2).map(lambda row: row))
    assert not _private.holds_examples_back([1, 2, 3])
