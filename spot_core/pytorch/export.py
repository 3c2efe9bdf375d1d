"""Write a generation in a format that others read; one process is enough, whatever the number of ranks that saved it.

- ``dcp``: a folder for `torch.distributed.checkpoint` (`FileSystemReader`, `dcp_to_torch_save`). Of a large state only
  a part is in memory at a time.
- ``torch``: one `torch.save` file with the nested state, which loads with `weights_only=True`. Whole in memory.
- ``safetensors``: one file with the tensors by their dotted names. Whole in memory.

The shared state is exported; what each rank saved for itself (random state, loader positions) means nothing elsewhere.
All bytes are checked against their digests. The output appears under its name complete, or not at all.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import logging
import os
import pathlib
import pickle
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from spot_core.errors import ConfigError, FormatError
from spot_core.generation import Committed
from spot_core.layout import GenerationId
from spot_core.pytorch.catalogue import Catalogue
from spot_core.pytorch.codec import KIND, torch_dtype
from spot_core.pytorch.fetch import fetch_bytes
from spot_core.pytorch.loader import read_tensors
from spot_core.pytorch.reader import find_generation
from spot_core.pytorch.state import join, tensor_nodes
from spot_core.run import Run

__all__ = ["FORMATS", "export"]

_log = logging.getLogger(__name__)

_IN_MEMORY_BYTES = 1 << 30
_BATCH_BYTES = 128 << 20


def export(
    run: Run,
    generation: Committed | GenerationId | str | None,
    out: str | os.PathLike[str],
    fmt: str = "torch",
    *,
    prefix: str = "",
    threads: int = 4,
    allow_pickle: bool = False,
) -> None:
    """Write `generation` (None: the newest good one) of `run` to `out`, a local path that must not exist yet.

    fmt: ``"dcp"``, ``"torch"`` or ``"safetensors"``.
    prefix: export only what is below this dotted path, named from there, e.g. ``"state_dict."`` for the weights alone.
    allow_pickle: also export values that were saved as pickles, which runs their code; without it they are left out.

    Raises ConfigError for a bad argument or an `out` that exists, NoGenerationError, CorruptShardError,
    TornGenerationError, StoreError; `out` does not exist then.
    """
    write = FORMATS.get(fmt)
    if write is None:
        raise ConfigError(f"No format {fmt!r}.", hint=f"Choose one of {', '.join(FORMATS)}.")
    target = pathlib.Path(out)
    if target.exists():
        raise ConfigError(f"{target} exists; an export never replaces anything.", hint="Choose a new name.")
    wanted = generation.id if isinstance(generation, Committed) else generation
    catalogue = Catalogue.read(run.store, find_generation(run, wanted), threads=threads)
    if catalogue.shared_tree is None:
        raise FormatError(f"The {catalogue.where} holds no training state: it was written by something else.")
    tree = _below(catalogue.shared_tree, prefix.rstrip("."))
    with _appearing(target) as temporary:
        write(catalogue, tree, prefix, temporary, threads, allow_pickle)


@contextmanager
def _appearing(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A name beside `target` to write to, which becomes `target` at the end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)
        raise


def _below(tree: Any, path: str) -> Any:
    """The part of the tree at a dotted path. Keys may hold dots themselves, so the longest key that fits is taken."""
    node = tree
    while path:
        named = {str(key): child for key, child in _entries(node)}
        fitting = [key for key in named if path == key or path.startswith(f"{key}.")]
        if not fitting:
            raise ConfigError(
                f"The state has nothing at {path!r}.", hint=f"It has {', '.join(sorted(named)) or 'no names'}."
            )
        key = max(fitting, key=len)
        node, path = named[key], path[len(key) + 1 :]
    return node


def _entries(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, list):
        return list(enumerate(node))
    if not isinstance(node, dict):
        return []
    kind = node.get(KIND)
    return list(node.items()) if kind is None else [(pair[0], pair[1]) for pair in node.get("items", [])]


def _values(catalogue: Catalogue, tree: Any, tensors: Mapping[str, torch.Tensor], threads: int, allow: bool) -> Any:
    """The state below `tree` without what others could not load: see `_plain`."""
    objects = fetch_bytes(catalogue, [name for name in catalogue.objects if name in _names(tree)], threads=threads)
    if not allow:
        tree = _without_pickles(tree)
    return _plain(join(tree, tensors, objects, allow_pickle=allow))


def _names(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["fqn"]} if KIND in node and "fqn" in node else set()
        return own.union(*(_names(child) for child in node.values()))
    return set().union(*(_names(child) for child in node)) if isinstance(node, list) else set()


def _without_pickles(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_pickles(child) for child in node]
    if not isinstance(node, dict):
        return node
    if node.get(KIND) == "object" and node.get("pickle"):
        _log.warning("%s is a pickled %s and is left out of the export.", node["path"], node["type"])
        return {KIND: "dropped", "type": node["type"]}
    return {key: _without_pickles(child) for key, child in node.items()}


_PLAIN: tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...] = (
    (torch.Tensor, lambda value: value),
    (np.generic, lambda value: _plain(value.item())),
    (np.ndarray, lambda value: _array(value)),
    (enum.Enum, lambda value: _plain(value.value)),
    ((torch.Size, torch.dtype, torch.device, torch.layout, bool, int, float, complex, str, bytes), lambda value: value),
    (collections.OrderedDict, lambda value: collections.OrderedDict(_pairs(value))),
    (dict, lambda value: dict(_pairs(value))),
    (tuple, lambda value: tuple(map(_plain, value))),
    ((list, collections.deque), lambda value: list(map(_plain, value))),
    (set, lambda value: set(map(_plain, value))),
    (frozenset, lambda value: tuple(map(_plain, value))),
    (bytearray, bytes),
    (
        (
            pathlib.PurePath,
            datetime.date,
            datetime.time,
            datetime.timedelta,
            datetime.tzinfo,
            uuid.UUID,
            decimal.Decimal,
        ),
        str,
    ),
    ((fractions.Fraction, range, slice, torch.memory_format), str),
)


def _plain(value: Any) -> Any:
    """The value in types that `torch.load(weights_only=True)` knows: paths and times as text, enums by value, ..."""
    for kinds, convert in _PLAIN:
        if isinstance(value, kinds):
            return convert(value)
    return value


def _pairs(value: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    return ((_plain(key), _plain(item)) for key, item in value.items())


def _array(value: np.ndarray[Any, Any]) -> Any:
    native = value.astype(value.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(native)
    except TypeError:  # text and times
        return _plain(native.tolist())


def _write_torch(
    catalogue: Catalogue, tree: Any, prefix: str, out: pathlib.Path, threads: int, allow_pickle: bool
) -> None:
    names = {node["fqn"] for node in tensor_nodes(tree)}
    state = _values(catalogue, tree, read_tensors(catalogue, names, threads=threads), threads, allow_pickle)
    with out.open("wb") as file:
        torch.save(state, file)
        _settle(file)
    if allow_pickle:
        return
    try:
        torch.load(out, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(f"The {catalogue.where} holds values that weights_only=True refuses: {error}") from error


def _write_safetensors(
    catalogue: Catalogue, tree: Any, prefix: str, out: pathlib.Path, threads: int, allow_pickle: bool
) -> None:
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise ConfigError("This export needs safetensors.", hint="pip install safetensors") from error
    nodes = [node for node in tensor_nodes(tree) if node[KIND] == "tensor"]
    kept, metadata = dict[str, str](), {"format": "pt"}
    for node in nodes:
        name, stored = node.get("as", node["fqn"]).removeprefix(prefix), node["fqn"]
        if stored in kept:
            # As safetensors' own `save_model` says it: this name is the other one's tensor.
            metadata[name] = kept[stored]
        else:
            kept[stored] = name
    tensors = read_tensors(catalogue, kept, threads=threads)
    try:
        save_file({name: tensors[stored] for stored, name in kept.items()}, out, metadata)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"safetensors cannot hold the {catalogue.where}: {error}") from error
    with out.open("rb+") as file:
        _settle(file)


def _write_dcp(
    catalogue: Catalogue, tree: Any, prefix: str, out: pathlib.Path, threads: int, allow_pickle: bool
) -> None:
    nodes = list(tensor_nodes(tree))
    arrays = read_tensors(catalogue, {node["fqn"] for node in nodes if node[KIND] == "array"}, threads=threads)
    standing_in = {
        fqn: torch.empty(
            catalogue.chunks(fqn)[0].shape, dtype=torch_dtype(catalogue.chunks(fqn)[0].dtype), device="meta"
        )
        for fqn in {node["fqn"]: None for node in nodes if node[KIND] == "tensor"}
    }
    state = _values(catalogue, _bare(tree), {**arrays, **standing_in}, threads, allow_pickle)
    planner = _LazyPlanner(catalogue, standing_in, threads)
    # The writer keeps what it wrote until its file is done, so a large state gets a file per tensor. One thread and
    # no copying ahead: it then asks for tensors in order.
    small = sum(tensor.nbytes for tensor in standing_in.values()) < _IN_MEMORY_BYTES
    writer = FileSystemWriter(out, single_file_per_rank=small, thread_count=1, per_thread_copy_ahead=0)
    state = state if isinstance(state, dict) else {"state": state}
    try:
        dcp_save(state, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:  # a BaseException, around what went wrong
        raise next(iter(error.failures.values()))[0] from None
    for path in (*out.iterdir(), out):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class _LazyPlanner(DefaultSavePlanner):
    """Reads tensors when they are written, some at a time: each read checks whole chunks of the generation."""

    def __init__(self, catalogue: Catalogue, standing_in: Mapping[str, torch.Tensor], threads: int) -> None:
        super().__init__()
        self._catalogue = catalogue
        self._threads = threads
        self._fqns = {id(tensor): fqn for fqn, tensor in standing_in.items()}
        self._sizes = {fqn: tensor.nbytes for fqn, tensor in standing_in.items()}
        self._read: dict[str, torch.Tensor] = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        fqn = self._fqns.get(id(value))
        if fqn is None:
            return value
        if fqn not in self._read:
            self._read = {}  # lets go of the ones before
            self._read = read_tensors(self._catalogue, self._some_from(fqn), threads=self._threads)
        return self._read[fqn]

    def _some_from(self, fqn: str) -> list[str]:
        names = list(self._sizes)
        chosen, nbytes = [fqn], 0
        for name in names[names.index(fqn) + 1 :]:
            nbytes += self._sizes[name]
            if nbytes > _BATCH_BYTES:
                break
            chosen.append(name)
        return chosen


def _bare(node: Any) -> Any:
    """Tensor nodes as plain references: no new tensors are made of the ones that stand in."""
    if isinstance(node, list):
        return [_bare(child) for child in node]
    if not isinstance(node, dict):
        return node
    if node.get(KIND) == "tensor":
        return {KIND: "tensor", "fqn": node["fqn"]}
    return {key: _bare(child) for key, child in node.items()}


def _settle(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


_Write = Callable[[Catalogue, Any, str, pathlib.Path, int, bool], None]
FORMATS: dict[str, _Write] = {"dcp": _write_dcp, "torch": _write_torch, "safetensors": _write_safetensors}
"""Format names and what writes them."""
