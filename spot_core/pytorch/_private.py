"""Private names of torch, and one of `datasets`, that this package cannot do without.

tests/pytorch/test_private.py fails when one of them vanishes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

from spot_core.errors import ConfigError

_DEEPEST = 1000  # steps of a stream's making


def storage_identity(tensor: torch.Tensor) -> int:
    """A number that two tensors share exactly when they share their storage.

    Why private: `data_ptr()`, the public way, is 0 for every empty storage, so it cannot tell two empty tensors apart
    nor see that two empty shards are tied (`_cdata` is what `torch.save` itself keys storages by).
    """
    return int(tensor.untyped_storage()._cdata)


def foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor], **options: bool) -> None:
    """Copy each source into its target, by one call; `options` as for `Tensor.copy_`.

    Why private: there is no public form, and a call per tensor costs a state of thousands of small ones many times more
    (torch's own optimizers use it).
    """
    torch._foreach_copy_(targets, sources, **options)


def namedtuple_fields(cls: type) -> tuple[str, ...] | None:
    """Field names of a named tuple's class, None for any other class.

    `_fields` is documented; the underscore only keeps it apart from the fields themselves.
    """
    fields = getattr(cls, "_fields", None)
    return fields if issubclass(cls, tuple) and isinstance(fields, tuple) else None


def sharded_tensor_class() -> type[torch.Tensor] | None:
    """`ShardedTensor`, in which FSDP1 hands out sharded states; None when this torch has none.

    Why private: it has no public import path, though `torch.distributed.checkpoint` saves and loads it.
    """
    try:
        from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined]
    except ImportError:
        return None
    return ShardedTensor


def clone_default_store() -> Any:
    """A clone, with a connection of its own, of the store that the default process group met over.

    Why private: there is no public accessor, and a store of our own takes an address that every rank reaches. Raises
    ConfigError for a store that has no clone (MPI, a user's own class).
    """
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    try:
        return store.clone()
    except (AttributeError, RuntimeError) as error:
        raise ConfigError(f"the store of the default process group cannot be cloned: {error}") from error


def iterates_plainly(loader: DataLoader[Any]) -> bool:
    """True when `loader` iterates as torch's own DataLoader does, so that one rebuilt from its parts gives the same.

    Why private: a subclass may replace `__iter__` or `_get_iterator`, and nothing public says whether it did; torch
    also wraps data pipes in a class of its own.
    """
    plain = type(loader).__iter__ is DataLoader.__iter__ and type(loader)._get_iterator is DataLoader._get_iterator
    return plain and not isinstance(loader.dataset, (IterDataPipe, MapDataPipe))


def kept_iterator(loader: DataLoader[Any]) -> Any:
    """The iterator that a DataLoader with persistent workers keeps between passes, else None.

    Why private: ending such workers early is only possible through it; Lightning does it by this very attribute.
    """
    return loader._iterator


def drop_kept_iterator(loader: DataLoader[Any], value: Any = None) -> None:
    """Counterpart of `kept_iterator`: the next pass starts workers anew."""
    loader._iterator = value


def holds_examples_back(stream: Any) -> bool:
    """Whether a `datasets.IterableDataset` shuffles in a buffer, whose content is not in its state.

    Why private: nothing public tells what a stream was made of. Anything else holds nothing back.
    """
    pending: list[Any] = [getattr(stream, "_ex_iterable", None)]
    seen = 0
    while pending and seen < _DEEPEST:
        source, seen = pending.pop(), seen + 1
        if "BufferShuffled" in type(source).__name__:
            return True
        pending += [source.ex_iterable] if hasattr(source, "ex_iterable") else []
        pending += list(getattr(source, "ex_iterables", ()))
    return False
