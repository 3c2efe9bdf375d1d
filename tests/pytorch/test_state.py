"""split/join gives back every value bit for bit, refuses what cannot be loaded back, and runs nothing from a file."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import io
import json
import math
import pathlib
import pickle
import struct
import sys
import typing
import uuid
import zoneinfo

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from spot_core.errors import ConfigError, FormatError
from spot_core.pytorch.state import Split, join, split, tensor_nodes

from .same import same


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Point(typing.NamedTuple):
    x: float
    y: torch.Tensor


Pair = collections.namedtuple("Pair", ["left", "right"])


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value


def there_and_back(value: object, **keywords: object) -> object:
    parts = split(value, **keywords)
    return join(json.loads(json.dumps(parts.tree, sort_keys=True)), parts.tensors, parts.objects)


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any dtype, from random bytes (nan payloads included) or random booleans."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**300), 2**300)
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.text(alphabet="ab.~$é\ud800", max_size=3)
    | st.binary(max_size=20)
    | st.binary(max_size=20).map(bytearray)
    | st.datetimes()
    | st.datetimes(timezones=st.just(datetime.timezone.utc))
    | st.datetimes(timezones=st.just(zoneinfo.ZoneInfo("Europe/Berlin")))
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.decimals()
    | st.fractions()
    | st.uuids()
    | st.sampled_from(DTYPES)
    | st.sampled_from(
        [
            pathlib.Path("/a b/c"),
            pathlib.PureWindowsPath("c:\\x"),
            pathlib.PurePosixPath("é"),
            torch.device("cpu"),
            torch.device("cuda", 3),
            torch.Size([2, 0, 3]),
            torch.strided,
            torch.channels_last,
            range(3, 90, 7),
            slice(1, None, 2),
            Colour.BLUE,
            Level.LOW,
            np.float32("nan"),
            np.float64(0.1),
            np.int8(-3),
            np.bool_(True),
            np.str_("né"),
            np.str_(""),
            np.datetime64("2024-02-03T04:05:06.789"),
            np.complex64(1 - 2j),
            datetime.timezone(datetime.timedelta(hours=-3, minutes=-30)),
        ]
    )
)
shapes = st.lists(st.integers(0, 3), max_size=3)
tensors = st.builds(lambda dtype, shape: filled(dtype, *shape), st.sampled_from(DTYPES), shapes)
arrays = st.builds(
    lambda dtype, shape: (
        np.frombuffer(bytes(range(250)), np.uint8)[: math.prod(shape) * np.dtype(dtype).itemsize]
        .view(dtype)
        .reshape(shape)
    ),
    st.sampled_from(["<f4", ">f8", "<u2", "|i1", "<M8[s]", "<c8", ">i2"]),
    shapes,
)
keys = st.text(max_size=3) | st.integers(-3, 3) | st.none() | st.booleans() | st.binary(max_size=2)
hashable = keys | st.tuples(keys, keys)


def containers(children: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    pairs = st.dictionaries(hashable, children, max_size=4)
    return (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | pairs
        | st.dictionaries(st.sampled_from(["a", "a.b", "b", "$", "", "rank00000", "a~2"]), children, max_size=5)
        | pairs.map(collections.OrderedDict)
        | pairs.map(lambda d: collections.defaultdict(list, d))
        | pairs.map(lambda d: collections.defaultdict(None, d))
        | st.lists(children, max_size=3).map(lambda v: collections.deque(v, maxlen=5))
        | st.tuples(children, children).map(lambda v: Pair(*v))
        | st.sets(hashable, max_size=3)
        | st.frozensets(hashable, max_size=3)
        | st.dictionaries(keys, st.integers(), max_size=3).map(collections.Counter)
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.recursive(scalars | tensors | arrays, containers, max_leaves=12))
def test_any_nesting_comes_back_bit_for_bit(value: object) -> None:
    back = there_and_back(value)
    assert same(back, value), (value, back)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (3, 4)], ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = filled(dtype, *shape)
    assert same(there_and_back([value]), [value])


@pytest.mark.parametrize(
    "value",
    [
        float("-inf"),
        -0.0,
        struct.unpack(">d", bytes.fromhex("7ff0000000000123"))[0],
        10**5000,
        "\ud800",
        datetime.datetime(2024, 10, 27, 2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"), fold=1),
        decimal.Decimal("NaN123"),
        fractions.Fraction(1, 3),
        uuid.UUID(int=7),
        bytes(10_000),
        bytearray(10_000),
        {"$": "tensor", "fqn": "not a reference"},
        {1: "int", "1": "text", True and 2: None},
        Point(1.5, torch.arange(3)),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(10)[::3],
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_json_alone_would_lose(value: object) -> None:
    assert same(there_and_back({"v": value}), {"v": value})


def test_names_follow_the_path_and_never_collide() -> None:
    t = [torch.full((1,), float(i)) for i in range(5)]
    state = {"a.b": t[0], "a": {"b": t[1], "b~2": t[2]}, "rank00001": {"x": t[3]}, "o": {0: t[4]}}
    parts = split(state)
    assert list(parts.tensors) == ["a.b", "a.b~2", "a.b~2~2", "~rank00001.x", "o.0"]
    assert same(join(parts.tree, parts.tensors, parts.objects), state)


def test_a_module_state_keeps_its_names_and_its_version_metadata() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    parts = split({"state_dict": module.state_dict()})
    assert list(parts.tensors) == [f"state_dict.{name}" for name in module.state_dict()]
    back = join(parts.tree, parts.tensors, parts.objects)["state_dict"]
    assert back._metadata == module.state_dict()._metadata
    assert parts.tensors["state_dict.0.weight"].data_ptr() == module[0].weight.data_ptr()  # a reference, not a copy


def test_tied_tensors_are_stored_once_and_tied_again() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    state = {"a": weight.detach(), "b": weight.detach(), "row": weight.detach()[0], "t": weight.detach().t()}
    parts = split(state)
    assert list(parts.tensors) == ["a", "row", "t"]
    assert [node.get("as") for node in tensor_nodes(parts.tree)] == [None, "b", None, None]
    copies = {name: tensor.clone() for name, tensor in parts.tensors.items()}
    back = join(parts.tree, copies, {})
    assert back["a"] is back["b"]
    assert back["row"].data_ptr() != back["a"].data_ptr()
    assert same(back, state)


def test_empty_tensors_are_tied_only_if_they_share_a_storage() -> None:
    one, other = torch.empty(0), torch.empty(0)
    assert list(split({"a": one, "b": one.detach(), "c": other}).tensors) == ["a", "c"]


def test_parameters_gradients_and_strides_come_back() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {
        "p": nn.Parameter(torch.randn(2)),
        "frozen": nn.Parameter(torch.randn(2), requires_grad=False),
        "leaf": torch.randn(2, requires_grad=True),
        "image": image,
        "lazy": torch.randn(2, dtype=torch.complex64).conj(),
    }
    parts = split(state)
    assert not any(tensor.requires_grad for tensor in parts.tensors.values())
    rows = {name: tensor.contiguous() for name, tensor in parts.tensors.items()}  # as a blob holds them
    back = join(parts.tree, rows, {})
    assert isinstance(back["p"], nn.Parameter)
    assert back["p"].requires_grad
    assert isinstance(back["frozen"], nn.Parameter)
    assert not back["frozen"].requires_grad
    assert back["leaf"].requires_grad
    assert not isinstance(back["leaf"], nn.Parameter)
    assert back["image"].stride() == image.stride()
    assert torch.equal(back["image"], image)
    assert torch.equal(back["lazy"], state["lazy"].resolve_conj())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("make", [lambda: torch.eye(3).to_sparse(), lambda: torch.eye(3).to_sparse_csr()])
def test_sparse_tensors_travel_as_objects(make: typing.Callable[[], torch.Tensor]) -> None:
    small, large = make(), torch.eye(3000).to_sparse()
    parts = split({"small": small, "large": large})
    assert list(parts.objects) == ["large"]  # the small one stands in the tree
    assert not parts.tensors
    back = join(parts.tree, {}, parts.objects)
    assert torch.equal(back["small"].to_dense(), torch.eye(3))
    assert torch.equal(back["large"].to_dense(), torch.eye(3000))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "value", [Opaque(3), lambda: 0, io.StringIO(), collections.defaultdict(lambda: 0)], ids=list("abcd")
)
def test_a_value_that_could_not_be_loaded_is_refused_with_its_path_and_the_ways_out(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        split({"callbacks": {"Mine": [1, value]}})
    message = str(caught.value)
    for part in ("callbacks.Mine.1", type(value).__qualname__, "add_safe_globals", "allow_pickle=True"):
        assert part in message


def test_droppable_paths_are_left_out_with_their_type_and_nothing_else_is() -> None:
    state = {"hyper_parameters": {"lr": 0.1, "loss": Opaque(1), "seq": [Opaque(2), 2]}, "step": 3}
    parts = split(state, droppable=("hyper_parameters",))
    assert f"{Opaque.__module__}.Opaque" in json.dumps(parts.tree)
    assert join(parts.tree, {}, {}) == {"hyper_parameters": {"lr": 0.1, "seq": [None, 2]}, "step": 3}
    with pytest.raises(ConfigError, match="hyper_parameters_too"):
        split({"hyper_parameters_too": Opaque(1)}, droppable=("hyper_parameters",))


def test_a_type_made_safe_by_the_user_travels_without_pickle() -> None:
    with torch.serialization.safe_globals([Opaque]):
        parts = split({"o": Opaque(5)})
        assert "pickle" not in parts.tree["o"]
        assert join(parts.tree, {}, parts.objects)["o"].value == 5


def test_pickles_are_written_and_read_only_when_both_sides_allow_it() -> None:
    parts = split({"o": Opaque(5)}, allow_pickle=True)
    assert join(parts.tree, {}, parts.objects, allow_pickle=True)["o"].value == 5
    with pytest.raises(ConfigError, match=r"pickled .*Opaque.*allow_pickle"):
        join(parts.tree, {}, parts.objects)


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (exec, ("import builtins; builtins.bomb_went_off = True",))


def test_a_malicious_object_is_not_executed() -> None:
    parts = split({"o": torch.eye(3000).to_sparse()})
    for data in (pickle.dumps(Bomb(), protocol=2), _saved(Bomb())):
        with pytest.raises(pickle.UnpicklingError):
            join(parts.tree, {}, {"o": data})
    assert not hasattr(sys.modules["builtins"], "bomb_went_off")


def _saved(value: object) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


@pytest.mark.parametrize(
    "node",
    [
        {"$": "enum", "class": "os:environ", "v": "PATH"},
        {"$": "enum", "class": "no_such_module:X", "v": "A"},
        {"$": "dtype", "v": "load"},
        {"$": "telepathy"},
        {"$": "tensor", "fqn": "gone"},
        {"$": "object", "fqn": "gone", "path": "x", "type": "x"},
    ],
    ids=str,
)
def test_a_tree_that_names_what_is_not_there_is_a_format_error(node: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        join({"x": node}, {}, {})


def test_a_named_tuple_whose_class_is_gone_is_still_a_named_tuple() -> None:
    tree = {"$": "namedtuple", "class": "no_such_module:Thing", "fields": ["a", "b"], "v": [1, 2]}
    back = join(tree, {}, {})
    assert back == (1, 2)
    assert back.b == 2
    assert type(back).__name__ == "Thing"
    tree["class"] = "subprocess:Popen"
    assert join(tree, {}, {}) == (1, 2)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, object] = {}
    state["self"] = [state]
    with pytest.raises(ConfigError, match="contains itself"):
        split(state)


def test_a_meta_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.w.*meta"):
        split({"model": {"w": torch.empty(2, device="meta")}})


def test_an_optimizer_continues_the_same_from_its_joined_state() -> None:
    def trained(steps: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            module(torch.full((2, 3), float(step))).sum().backward()
            optimizer.step()

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = nn.Linear(3, 2)
        return module, torch.optim.AdamW(module.parameters())

    control, control_optimizer = fresh()
    trained(3, control, control_optimizer)
    parts: Split = split({"m": control.state_dict(), "o": control_optimizer.state_dict()})
    copies = {name: tensor.clone() for name, tensor in parts.tensors.items()}
    trained(2, control, control_optimizer)

    module, optimizer = fresh()
    back = join(json.loads(json.dumps(parts.tree, sort_keys=True)), copies, parts.objects)
    module.load_state_dict(back["m"])
    optimizer.load_state_dict(back["o"])
    trained(2, module, optimizer)
    assert same(module.state_dict(), control.state_dict())
    assert same(optimizer.state_dict(), control_optimizer.state_dict())
