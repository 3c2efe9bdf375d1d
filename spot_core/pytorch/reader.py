"""A plain user of `torch.distributed.checkpoint` reads a generation::

    dcp.load(state_dict, storage_reader=SpotStorageReader("s3://bucket/run"))

`state_dict` is (part of) the nested state that was saved as shared; DTensors are filled however the saving ranks were
sharded. What a rank saved for itself is found under its prefix (``"rank00000.rng"``). Nothing of a generation is
unpickled to find out what is in it, and all bytes are checked against their digests.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from spot_core.errors import ConfigError, NoGenerationError
from spot_core.layout import GenerationId
from spot_core.pytorch.catalogue import Catalogue
from spot_core.pytorch.codec import KIND
from spot_core.pytorch.fetch import fetch, fetch_bytes
from spot_core.pytorch.index import local_prefix
from spot_core.pytorch.loader import read_tensors, transfer_of
from spot_core.pytorch.state import join, tensor_nodes
from spot_core.run import Run
from spot_core.store import Store
from spot_core.verify import Depth, Verified

__all__ = ["SpotStorageReader", "find_generation"]

_DICTS = ("dict", "ordered_dict", "default_dict", "counter")


class SpotStorageReader(StorageReader):
    """Reads one generation of `run` (a path, a URI, a Store or a Run).

    generation: its name or id; None for the newest good one. On several ranks, name it: each rank looks for itself,
        and the load is refused when they found different ones.
    storage_options: for the store, where `run` is a path or URI.
    allow_pickle: also read values that were saved as pickles, which runs code from the generation.

    Raises, from `dcp.load` on every rank (wrapped in its CheckpointException): NoGenerationError, CorruptShardError,
    TornGenerationError, StoreError.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Store | Run,
        generation: str | GenerationId | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        threads: int = 4,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__()
        self._run = run if isinstance(run, Run) else Run.open(run, storage_options=storage_options)
        self._wanted = generation
        self._threads = threads
        self._allow_pickle = allow_pickle
        self._catalogue: Catalogue | None = None
        self._values: dict[str, Any] = {}

    @property
    def catalogue(self) -> Catalogue:
        if self._catalogue is None:
            verified = find_generation(self._run, self._wanted)
            self._catalogue = Catalogue.read(self._run.store, verified, threads=self._threads)
        return self._catalogue

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """`checkpoint_id` names a generation."""
        if checkpoint_id is not None:
            self._wanted = os.fspath(checkpoint_id)
        self._catalogue, self._values = None, {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._values = _value_nodes(self.catalogue)
        # An array's bytes are a tensor of ours, but DCP knows the array as a value.
        found: dict[str, Any] = {**self.catalogue.metadata(), **dict.fromkeys(self._values, BytesStorageMetadata())}
        return Metadata(found, storage_meta=StorageMeta(checkpoint_id=self.catalogue.generation.name))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return LoadPlan(plan.items, storage_data=self.catalogue.generation.name, planner_data=plan.planner_data)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        names = {plan.storage_data for plan in plans}
        if len(names) > 1:
            raise ConfigError(
                f"The ranks found different newest generations in {self._run.uri}: {', '.join(sorted(names))}.",
                hint="The run was being written to; pass generation= to SpotStorageReader.",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        transfers = [transfer_of(self.catalogue, planner, item) for item in tensors]
        fetch(self.catalogue, transfers, threads=self._threads)
        for item, transfer in zip(tensors, transfers, strict=True):
            planner.commit_tensor(item, transfer.target)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._as_saved(item.storage_index.fqn))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _as_saved(self, name: str) -> io.BytesIO:
        """The value as DCP expects it: what `torch.save` makes of it (and DCP unpickles, from our own pickling)."""
        node = self._values[name]
        prefix = next((p for p in map(local_prefix, self.catalogue.local_trees) if name.startswith(p)), "")
        tensors = read_tensors(self.catalogue, [prefix + node["fqn"] for node in tensor_nodes(node)])
        objects = fetch_bytes(self.catalogue, [prefix + fqn for fqn in _object_names(node)])
        value = join(
            node,
            {fqn.removeprefix(prefix): tensor for fqn, tensor in tensors.items()},
            {fqn.removeprefix(prefix): data for fqn, data in objects.items()},
            allow_pickle=self._allow_pickle,
        )
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        return data

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return GenerationId.parse(os.fspath(checkpoint_id)) is not None


def find_generation(run: Run, wanted: str | GenerationId | None, depth: Depth = Depth.SIZES) -> Verified:
    """The generation of that name, or the newest good one for None.

    Raises NoGenerationError when there is none, TornGenerationError or CorruptShardError when it (or, for None, every
    one) is damaged, StoreError.
    """
    discovery = run.discover()
    if wanted is None:
        found = run.select(depth, discovery=discovery).verified
        if found is None:
            raise NoGenerationError(f"The run at {run.uri} has no generation.")
        return found
    for committed in discovery.generations:
        if str(wanted) == committed.id.name:
            return run.verify(committed, depth)
    names = ", ".join(committed.id.name for committed in discovery.generations[:5]) or "none"
    raise NoGenerationError(f"The run at {run.uri} has no generation {wanted}. It has: {names}.")


def _value_nodes(catalogue: Catalogue) -> dict[str, Any]:
    """Every value of the state by its dotted path, as DCP names values.

    DCP always takes dicts apart, and lists only if they hold dicts or tensors, so that a list may be asked for whole.
    """
    found: dict[str, Any] = {}
    _walk(catalogue.shared_tree, "", found)
    for rank, tree in catalogue.local_trees.items():
        _walk(tree, local_prefix(rank).removesuffix("."), found)
    return found


def _walk(node: Any, path: str, found: dict[str, Any]) -> None:
    kind = node.get(KIND) if isinstance(node, dict) else None
    is_dict = kind in _DICTS or (isinstance(node, dict) and kind is None)
    if path and not is_dict and kind not in ("tensor", "dropped"):
        found.setdefault(path, node)
    for name, child in _children(node, kind):
        _walk(child, f"{path}.{name}" if path else name, found)


def _children(node: Any, kind: str | None) -> list[tuple[str, Any]]:
    if isinstance(node, list):
        return [(str(i), child) for i, child in enumerate(node)]
    if kind in _DICTS:
        pairs = [(key, child) for key, child in node["items"] if not isinstance(key, (dict, list))]
        return [(str(key), child) for key, child in pairs]
    return list(node.items()) if isinstance(node, dict) and kind is None else []


def _object_names(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["fqn"]] if node.get(KIND) in ("object", "bytes", "bytearray") and "fqn" in node else []
        return own + [name for child in node.values() for name in _object_names(child)]
    return [name for child in node for name in _object_names(child)] if isinstance(node, list) else []
