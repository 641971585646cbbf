"""All functions accept the same objects, and refuse others with the same reason, at any path."""

from __future__ import annotations

import array
import asyncio
import atexit
import collections
import dataclasses
import importlib
import io
import itertools
import os
import pathlib
import sqlite3
import threading
import types
import warnings

import pytest
from support.errors import advice

import dlx
from dlx import errors

np = pytest.importorskip("numpy")
DATABASE = sqlite3.connect(":memory:")  # Python 3.13 warns if one is collected before it is closed


def lib(name):
    """Import a library, or skip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def _parquet(folder):
    pa = lib("pyarrow")
    lib("pyarrow.parquet").write_table(pa.table({"x": [1.0, 2.0]}), folder / "x.parquet")
    return folder / "x.parquet"


def _hdf5(folder):
    file = lib("h5py").File(folder / "x.h5", "w")
    file["x"] = np.ones(2)
    return file


def _npz(folder):
    np.savez(folder / "x.npz", x=np.ones(2))
    return np.load(folder / "x.npz")


def _hf(folder):
    lib("pyarrow.dataset")
    return lib("datasets").Dataset.from_dict({"x": [1.0, 2.0]})


def _model(folder):
    pydantic = lib("pydantic")

    class Model(pydantic.BaseModel):
        x: object

    return Model(x=np.ones(2))


def _struct(folder):
    return lib("msgspec").defstruct("Struct", [("x", object)])(np.ones(2))


def _tensorclass(folder):
    torch = lib("torch")

    @lib("tensordict").tensorclass
    class Data:
        x: torch.Tensor

    return Data(x=torch.ones(2), batch_size=[])


def _torch_data(folder):
    class Data(lib("torch").utils.data.Dataset):
        pass

    return Data()


def _nnx(folder):
    nnx = lib("flax.nnx")
    return nnx.Linear(1, 1, rngs=nnx.Rngs(0))


class Plain:
    """An object of a class that dlx does not know."""

    def __init__(self):
        self.x = [1.0]


class HasState:
    def state_dict(self):
        raise AssertionError("it was called")


class Iterating:
    """An iterator of a user's class, which dlx does not know either."""

    def __iter__(self):
        return self

    def __next__(self):
        raise AssertionError("it was iterated over")


ARRAYS = {
    "numpy": lambda _: np.arange(2.0),
    "numpy of another order": lambda _: np.arange(2.0).astype(">f8"),
    "torch": lambda _: lib("torch").arange(2.0),
    "jax": lambda _: lib("jax.numpy").arange(2.0),
    "dlx": lambda _: dlx.from_dlpack(np.arange(2.0)),
    "pyarrow": lambda _: lib("pyarrow").array([1.0, 2.0]),
    "pyarrow chunks": lambda _: lib("pyarrow").chunked_array([[1.0], [2.0]]),
    "pandas": lambda _: lib("pandas").Series([1.0, 2.0]),
    "pandas by Arrow": lambda _: lib("pyarrow") and lib("pandas").Series([1.0, 2.0], dtype="double[pyarrow]"),
    "polars": lambda _: lib("polars").Series([1.0, 2.0]),
    "narwhals": lambda _: lib("narwhals").from_native(lib("polars").Series([1.0, 2.0]), series_only=True),
    "nanoarrow": lambda _: lib("nanoarrow").Array([1.0, 2.0], lib("nanoarrow").float64()),
    "xarray": lambda _: lib("xarray").DataArray(np.arange(2.0)),
    "xarray of another": lambda _: lib("xarray").DataArray(lib("array_api_strict").asarray([1.0, 2.0])),
    "xarray variable": lambda _: lib("xarray").Variable("x", np.arange(2.0)),
    "pillow": lambda _: lib("PIL.Image").new("RGB", (2, 2)),
    "h5py": lambda folder: _hdf5(folder)["x"],
    "onnxruntime": lambda _: lib("onnxruntime").OrtValue.ortvalue_from_numpy(np.arange(2.0)),
    "bytes": lambda _: b"abc",
    "array.array": lambda _: array.array("d", [1.0, 2.0]),
    "numpy scalar": lambda _: np.float32(1),
    "element of a view": lambda _: dlx.convert([np.arange(2.0)], to="dlx", lazy=True)[0],
    "element of a file": lambda folder: dlx.open(_npz(folder).fid and folder / "x.npz")["x"],
}
PASSING = ("bytes", "array.array", "numpy scalar")  # inside a container: buffers and scalars are data there

CONTAINERS = {
    "list": lambda _: [np.ones(2)],
    "dict": lambda _: {"x": np.ones(2)},
    "named tuple": lambda _: collections.namedtuple("Pair", "x")(np.ones(2)),
    "lazy view": lambda _: dlx.convert([np.ones(2)], to="dlx", lazy=True),
    "pandas": lambda _: lib("pandas").DataFrame({"x": [1.0, 2.0]}),
    "polars": lambda _: lib("polars").DataFrame({"x": [1.0, 2.0]}),
    "pyarrow": lambda _: lib("pyarrow").table({"x": [1.0, 2.0]}),
    "pyarrow batch": lambda _: lib("pyarrow").record_batch({"x": [1.0, 2.0]}),
    "duckdb": lambda _: lib("pyarrow") and lib("duckdb").sql("select 1.0::double as x"),
    "xarray": lambda _: lib("xarray").Dataset({"x": ("i", np.ones(2))}),
    "npz": _npz,
    "h5py": _hdf5,
    "tensordict": lambda _: lib("tensordict").TensorDict({"x": lib("torch").ones(2)}),
    "pydantic": _model,
    "msgspec": _struct,
}


def _tables(folder):
    file = lib("tables").open_file(folder / "x.h5", "w")
    atexit.register(file.close)  # PyTables warns about open files at exit
    file.create_array("/", "x", np.ones(2))
    return file


def _netcdf(folder):
    file = lib("netCDF4").Dataset(folder / "x.nc", "w")
    file.createDimension("n", 2)
    file.createVariable("x", "f4", ("n",))[:] = 1
    return file


async def _streaming():
    yield np.ones(2)


async def _listed(obj):
    return [each async for each in obj]


HOLDERS = {  # and a word of the fix
    "datasets.Dataset": (_hf, "with_format"),
    "datasets.IterableDataset": (lambda folder: _hf(folder).to_iterable_dataset(), "iter"),
    "datasets.Column": (lambda folder: _hf(folder)["x"], "pyarrow.array"),
    "datasets.InMemoryTable": (lambda folder: _hf(folder).data, ".table"),
    "anndata": (lambda _: lib("anndata").AnnData(np.ones((2, 3), "f4")), ".X"),
    "pyarrow dataset": (lambda folder: lib("pyarrow.dataset").dataset(_parquet(folder)), ".to_table()"),
    "pyarrow scanner": (lambda folder: lib("pyarrow.dataset").dataset(_parquet(folder)).scanner(), ".to_table()"),
    "ParquetFile": (lambda folder: lib("pyarrow.parquet").ParquetFile(_parquet(folder)), ".read()"),
    "ParquetDataset": (lambda folder: lib("pyarrow.parquet").ParquetDataset(_parquet(folder)), ".read()"),
    "duckdb connection": (lambda _: lib("duckdb").connect(), ".sql(query)"),
    "polars GroupBy": (lambda _: lib("polars").DataFrame({"a": [1]}).group_by("a"), ".agg"),
    "polars rolling": (lambda _: lib("polars").DataFrame({"a": [1]}).rolling("a", period="1i"), ".agg"),
    "polars dynamic": (lambda _: lib("polars").DataFrame({"a": [1]}).group_by_dynamic("a", every="1i"), ".agg"),
    "polars LazyFrame": (lambda _: lib("polars").LazyFrame({"a": [1]}), ".collect()"),
    "polars LazyGroupBy": (lambda _: lib("polars").LazyFrame({"a": [1]}).group_by("a"), ".agg"),
    "pandas GroupBy": (lambda _: lib("pandas").DataFrame({"a": [1]}).groupby("a"), "dict(list(it))"),
    "pandas SeriesGroupBy": (lambda _: lib("pandas").Series([1]).groupby([1]), "dict(list(it))"),
    "pandas rolling": (lambda _: lib("pandas").Series([1.0]).rolling(1), ".agg"),
    "pandas Index": (lambda _: lib("pandas").Index([1]), ".to_numpy()"),
    "dask bag": (lambda _: lib("dask.bag").from_sequence([1]), ".compute()"),
    "dask delayed": (lambda _: lib("dask").delayed(np.ones)(2), ".compute()"),
    "torch module": (lambda _: lib("torch").nn.Linear(1, 1), ".state_dict()"),
    "torch modules": (lambda _: lib("torch").nn.ModuleList([lib("torch").nn.Linear(1, 1)]), ".state_dict()"),
    "torch optimizer": (lambda _: lib("torch").optim.SGD([lib("torch").ones(1)], 0.1), ".state_dict()"),
    "torch storage": (lambda _: lib("torch").ones(2).untyped_storage(), ".set_(x)"),
    "torch dataset": (_torch_data, "items"),
    "torch loader": (lambda _: lib("torch").utils.data.DataLoader([1]), "batch"),
    "torch distribution": (lambda _: lib("torch").distributions.Uniform(0.0, 1.0), "parameters"),
    "flax module": (_nnx, "nnx.state"),
    "a state of a user's": (lambda _: HasState(), ".state_dict()"),
    "tensorclass": (_tensorclass, ".to_dict()"),
    "scipy dia": (lambda _: lib("scipy.sparse").dia_array(np.eye(2)), ".tocsr()"),
    "scipy lil": (lambda _: lib("scipy.sparse").lil_array(np.eye(2)), ".tocsr()"),
    "scipy dok": (lambda _: lib("scipy.sparse").dok_array(np.eye(2)), ".tocsr()"),
    "astropy time": (lambda _: lib("astropy.time").Time([1.0], format="jd"), ".jd1"),
    "zarr group": (lambda _: lib("zarr").group(), ".arrays()"),
    "PyTables array": (lambda folder: _tables(folder).root.x, ".read()"),
    "PyTables file": (lambda folder: _tables(folder), ".walk_nodes("),
    "netCDF4 dataset": (lambda folder: _netcdf(folder), ".variables"),
    "asynchronous generator": (lambda _: _streaming(), "async for"),
    "nditer": (lambda _: np.nditer(np.ones(2)), ".operands"),
    "generator": (lambda _: (x for x in [np.ones(2)]), "list"),
    "map": (lambda _: map(np.ones, [1]), "list"),
    "zip": (lambda _: zip([np.ones(2)], strict=True), "list"),
    "filter": (lambda _: filter(None, []), "list"),
    "enumerate": (lambda _: enumerate([]), "list"),
    "iterator": (lambda _: iter([np.ones(2)]), "list"),
    "reversed": (lambda _: reversed([np.ones(2)]), "list"),
    "chain": (lambda _: itertools.chain([np.ones(2)]), "list"),
    "values": (lambda _: {"x": np.ones(2)}.values(), "list"),
    "items": (lambda _: {"x": np.ones(2)}.items(), "list"),
    "values of a mapping": (lambda _: collections.ChainMap({"x": np.ones(2)}).values(), "list"),
}

PLAIN = {
    "unknown": lambda _: Plain(),
    "iterator of a user's": lambda _: Iterating(),
    "text": lambda _: "text",
    "number": lambda _: 1.5,
    "path": pathlib.Path,
    "file": lambda _: io.StringIO("x\n"),
    "module": lambda _: os,
    "function": lambda _: len,
    "class": lambda _: np.ndarray,
    "range": lambda _: range(3),
    "its iterator": lambda _: iter(range(3)),
    "counter": lambda _: itertools.count(),
    "keys": lambda _: {"x": 1}.keys(),
    "lock": lambda _: threading.Lock(),
    "connection": lambda _: DATABASE,
    "numpy dtype": lambda _: np.dtype("f4"),
    "numpy generator": lambda _: np.random.default_rng(0),
    "torch dtype": lambda _: lib("torch").float32,
    "torch device": lambda _: lib("torch").device("cpu"),
    "torch generator": lambda _: lib("torch").Generator(),
    "jax struct": lambda _: lib("jax").ShapeDtypeStruct((2,), "float32"),  # it has no data
    "pandas timestamp": lambda _: lib("pandas").Timestamp("2020"),
    "polars expression": lambda _: lib("polars").col("a"),
    "pyarrow schema": lambda _: lib("pyarrow").schema([]),
}


def _borrow(obj):
    with dlx.borrow(obj, readonly=True):
        pass


def _share(obj):
    with dlx.share(obj):
        pass


def _plan(obj):
    error = dlx.plan(obj, to="dlx").error
    if error is not None:
        raise error


ONE = {  # verbs for one array
    "describe": dlx.describe,
    "stack": lambda obj: dlx.stack([obj, obj], to="dlx"),
    "shares_memory": lambda obj: dlx.shares_memory(obj, np.ones(1)),
    "shares_memory, second": lambda obj: dlx.shares_memory(np.ones(1), obj),
    "to_capsule": lambda obj: dlx.to_capsule(obj, max_version=(1, 0)),
    "to_capsule, legacy": dlx.to_capsule,
    "borrow": _borrow,
    "from_dlpack": dlx.from_dlpack,
}
TREES = {  # verbs that take containers
    "plan": _plan,
    "share": _share,
    "using": lambda obj: dlx.using("dlx")(lambda x: None)(obj),
    "convert lazily": lambda obj: dlx.convert(obj, to="dlx", lazy=True),
}


@dataclasses.dataclass
class Holding:
    x: object


PLACES = {  # how an object is put into a container, and how it is reached in the result
    "list": (lambda obj: [obj], lambda new: new[0], "[0]"),
    "dict": (lambda obj: {"a": obj}, lambda new: new["a"], "['a']"),
    "dataclass": (Holding, lambda new: new.x, ".x"),
    "inner": (lambda obj: {"a": (1, [obj])}, lambda new: new["a"][1][0], "['a'][1][0]"),
}


@pytest.fixture(autouse=True)
def quiet():
    """Hide deprecation warnings of libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def refused(call, *arguments):
    """Return the error of a call."""
    with pytest.raises(errors.DlxError) as caught:
        call(*arguments)
    return caught.value


def same(error, root):
    """Return whether two errors have the same text."""
    return (type(error), error.reason, error._fix) == (type(root), root.reason, root._fix)


@pytest.mark.few(140)
@pytest.mark.parametrize("verb", ONE | TREES)
@pytest.mark.parametrize("name", ARRAYS)
def test_every_verb_takes_every_array(name, verb, tmp_path):
    """An object that converts to one array is one array for every function."""
    obj = ARRAYS[name](tmp_path)
    assert type(dlx.convert(obj, to="dlx")) is dlx.Tensor
    if verb == "to_capsule, legacy" and dlx.convert(obj, to="dlx").readonly:
        assert isinstance(refused(ONE[verb], obj), errors.ReadOnlyError)
    else:
        (ONE | TREES)[verb](obj)


@pytest.mark.parametrize("name", ARRAYS)
def test_values_are_those_of_convert(name, tmp_path):
    """Stacked, shared, borrowed; in a container, a view and an argument, but for data that passes through."""
    obj = ARRAYS[name](tmp_path)
    values = dlx.convert(obj, to="dlx")
    wanted = np.asarray(values).tolist()
    assert np.asarray(dlx.stack([obj, obj], to="dlx")).tolist() == [wanted, wanted]
    with dlx.share(obj) as handle:
        assert np.asarray(dlx.attach(handle)).tolist() == wanted
    info = dlx.describe(obj)
    assert info.shape is None or (info.shape, info.dtype) == (values.shape, values.dtype)  # None: only a call tells
    for put, get, _ in PLACES.values():
        put, get, made = (lambda obj, put=put: [put(obj)]), (lambda new, get=get: get(new[0])), []
        dlx.using("dlx")(lambda x, get=get, made=made: made.append(get(x)))(put(obj))
        made += [get(dlx.convert(put(obj), to="dlx")), get(dlx.convert(put(obj), to="dlx", lazy=True))]
        for new in made:
            assert new is obj if name in PASSING else np.asarray(new).tolist() == wanted


@pytest.mark.few(60)
@pytest.mark.parametrize("verb", ONE | TREES)
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_are_refused_where_one_array_is_needed(name, verb, tmp_path):
    """The reason is the same everywhere; the other functions accept containers."""
    obj = CONTAINERS[name](tmp_path)
    if verb in TREES:
        TREES[verb](obj)
    elif (name, verb) == ("list", "stack"):  # which reads lists of numbers as arrays
        assert dlx.stack([[1, 2], [3, 4]], to="dlx").shape == (2, 2)
    else:
        error = refused(ONE[verb], obj)
        assert "not one array" in error.reason and "no array" not in str(error)
        assert error.where == ("arrays[0]" if verb == "stack" else "")


@pytest.mark.few(160)
@pytest.mark.parametrize("verb", ONE | TREES)
@pytest.mark.parametrize("name", HOLDERS)
def test_every_verb_refuses_what_convert_refuses_by_name(name, verb, tmp_path):
    """The reason is the same, and the fix works."""
    make, word = HOLDERS[name]
    obj = make(tmp_path)
    root = refused(lambda: dlx.convert(obj, to="dlx"))
    assert isinstance(root, errors.AdapterNotFoundError) and word in root.fix and "it is not an array" not in str(root)
    assert same(refused((ONE | TREES)[verb], obj), root)
    if verb == "using":
        function = dlx.using("dlx")(lambda x: obj)
        for _ in range(2):  # the second call knows its types
            assert same(refused(function, np.ones(1)), root)


@pytest.mark.few(70)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", HOLDERS)
def test_no_container_hides_what_is_refused(name, place, tmp_path):
    """It is refused at any path, which the error contains."""
    put, get, where = PLACES[place]
    obj = HOLDERS[name][0](tmp_path)
    root = refused(lambda: dlx.convert(obj, to="dlx"))
    ways = [
        (lambda: dlx.convert(put(obj), to="dlx"), "obj"),
        (lambda: dlx.convert(put(obj), to="dlx", strict=True), "obj"),
        (lambda: get(dlx.convert(put(obj), to="dlx", lazy=True)), "obj"),
        (lambda: dlx.convert(put(obj), to="dlx", lazy=True).materialize(), "obj"),
        (lambda: _plan(put(obj)), "obj"),
        (lambda: _share(put(obj)), "obj"),
        (lambda: dlx.using("dlx")(lambda x: None)(put(obj)), "x"),
    ]
    for call, start in ways:
        error = refused(call)
        assert same(error, root) and error.where == start + where
    with pytest.raises(ExceptionGroup) as caught:
        dlx.convert([put(obj), 1, obj], to="dlx", errors="collect")
    assert [error.where for error in caught.value.exceptions] == [f"obj[0]{where}", "obj[2]"]
    assert (
        dlx.using("dlx")(lambda x: put(obj))(b"abc") is not None
    )  # to a caller without a framework nothing is converted
    function = dlx.using("dlx")(lambda x: put(obj))
    for _ in range(2):  # the second call knows its types
        made = refused(function, np.ones(1))
        assert same(made, root) and made.where == f"result{where}"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", PLAIN)
def test_plain_data_passes_through(name, place, tmp_path):
    """It is refused only at the root, and with `strict` if it is not plain Python data."""
    put, get, _ = PLACES[place]
    obj = PLAIN[name](tmp_path)
    assert "it is not an array" in refused(lambda: dlx.convert(obj, to="dlx")).reason
    for verb, call in ONE.items():
        if (name, verb) != ("number", "stack"):  # which makes an array of numbers
            assert "it is not an array" in refused(call, obj).reason
    tree = [put(obj), dlx.empty(1, "int8")]
    assert get(dlx.convert(tree, to="dlx")[0]) is obj
    assert get(dlx.convert(tree, to="dlx", lazy=True)[0]) is obj
    assert dlx.using("dlx")(lambda tree: get(tree[0]))(tree) is obj and dlx.plan(tree, to="dlx").error is None


FIXES = {  # name of an object -> function that applies its fix
    "datasets.Dataset": lambda obj: obj.with_format("arrow")[:],
    "datasets.IterableDataset": lambda obj: list(obj.with_format("arrow").iter(2)),
    "datasets.Column": lambda obj: lib("pyarrow").array(obj[:]),
    "datasets.InMemoryTable": lambda obj: obj.table,
    "anndata": lambda obj: obj.X,
    "pyarrow dataset": lambda obj: obj.to_table(),
    "pyarrow scanner": lambda obj: obj.to_table(),
    "ParquetFile": lambda obj: obj.read(),
    "ParquetDataset": lambda obj: obj.read(),
    "duckdb connection": lambda obj: obj.sql("select 1.0::double as x"),
    "polars LazyFrame": lambda obj: obj.collect(),
    "polars GroupBy": lambda obj: obj.agg([]),
    "polars LazyGroupBy": lambda obj: obj.agg([]).collect(),
    "pandas GroupBy": lambda obj: dict(list(obj)),
    "pandas SeriesGroupBy": lambda obj: dict(list(obj)),
    "pandas rolling": lambda obj: obj.agg("sum"),
    "dask delayed": lambda obj: obj.compute(),
    "torch module": lambda obj: obj.state_dict(),
    "torch storage": lambda obj: lib("torch").empty(0, dtype=lib("torch").uint8).set_(obj),
    "flax module": lambda obj: lib("flax.nnx").to_pure_dict(lib("flax.nnx").state(obj)),
    "tensorclass": lambda obj: obj.to_dict(),
    "scipy dia": lambda obj: obj.toarray(),
    "scipy lil": lambda obj: obj.toarray(),
    "scipy dok": lambda obj: obj.toarray(),
    "astropy time": lambda obj: [obj.jd1, obj.jd2],
    "PyTables array": lambda obj: obj.read(),
    "PyTables file": lambda obj: {leaf._v_name: leaf.read() for leaf in obj.walk_nodes("/", "Leaf")},
    "netCDF4 dataset": lambda obj: {name: each[:].data for name, each in obj.variables.items()},
    "asynchronous generator": lambda obj: asyncio.run(_listed(obj)),
    "nditer": lambda obj: obj.operands,
    "generator": list,
    "values": list,
    "items": list,
}


@pytest.mark.parametrize("name", FIXES)
def test_the_fix_gives_arrays(name, tmp_path):
    """Its expressions return arrays for dlx."""
    plan = dlx.plan(FIXES[name](HOLDERS[name][0](tmp_path)), to="dlx")
    assert plan.error is None and (plan.leaves or plan.outcome in ("shared", "copied"))


@pytest.mark.parametrize("rows", [[[1, 2], [3]], [[1, 2], [3, 4]], [1, 2]])
def test_the_fixes_of_data_sets_convert_their_columns(rows):
    """Lists of several lengths become ragged arrays; numpy's format makes one array of lists of one length."""
    lib("pyarrow.dataset")
    data = lib("datasets").Dataset.from_dict({"x": rows})
    for obj in (data, data.to_iterable_dataset()):
        for holder, is_column in ((obj, False), (obj["x"], True)):
            first = advice.tried(refused(lambda holder=holder: dlx.convert(holder, to="torch")).fix, holder)[0]
            made = dlx.convert(next(first) if hasattr(first, "__next__") else first, to="torch")
            assert [row.tolist() for row in (made if is_column else made["x"]).unbind()] == rows
    if rows != [[1, 2], [3]]:
        for holder, read in ((data, lambda made: made["x"]), (data.with_format("numpy")["x"], np.asarray)):
            second = advice.tried(refused(lambda holder=holder: dlx.convert(holder, to="torch")).fix, holder)[-1]
            assert read(dlx.convert(second, to="numpy")).tolist() == rows


@pytest.mark.parametrize("verb", ONE | TREES)
def test_what_cannot_be_opened_is_refused_by_every_verb(verb):
    """The number of columns of a stream is known only after it is read."""
    pa = lib("pyarrow")
    reader = pa.table({"x": [1.0]}).to_reader()
    root = refused(lambda: dlx.convert(reader, to="dlx"))
    calls = [lambda: (ONE | TREES)[verb](reader)]
    if verb == "convert lazily":
        calls = [lambda: dlx.convert([reader], to="dlx", lazy=True)[0]]
    elif verb in TREES:
        calls.append(lambda: TREES[verb]({"a": [reader]}))
    for call in calls:
        assert same(refused(call), root)
    assert reader.read_all().num_rows == 1  # nothing was read


# ---- a function's own framework --------------------------------------------------------------------------------------


def test_a_function_takes_and_returns_models_of_its_own_framework():
    """Their arrays belong to the function's framework; arrays of another framework would not be converted."""
    torch = lib("torch")
    model = torch.nn.Linear(2, 1)

    @dlx.using("torch")
    def evaluate(model, x):
        return model, [model], model(x).detach()

    for _ in range(3):
        own, (inner,), y = evaluate(model, np.ones((1, 2), "f4"))
        assert own is model and inner is model and type(y) is np.ndarray
    other = dlx.using("numpy")(lambda model, x: x)
    for _ in range(2):
        assert refused(other, model, torch.ones(1)).where == "model"
        assert refused(other, {"a": model}, torch.ones(1)).where == "model['a']"
    assert dlx.using("torch")(lambda x: model)(np.ones(1)) is model
    assert refused(dlx.using("numpy")(lambda x: model), torch.ones(1)).where == "result"


def test_a_data_set_is_not_of_the_framework_that_it_inherits_from(tmp_path):
    """The data sets of datasets are torch's by their base, and hold Arrow's data."""
    data = _hf(tmp_path).to_iterable_dataset()
    lib("torch")
    assert refused(dlx.using("torch")(lambda data: None), data).where == "data"


def test_a_method_of_a_module_is_not_refused():
    """`self` is passed unchanged."""
    torch = lib("torch")

    class Net(torch.nn.Module):
        @dlx.using("numpy")
        def forward(self, x):
            return self, x * 2

    net = Net()
    own, y = net(torch.ones(2))
    assert own is net and y.tolist() == [2, 2]


# ---- stack -----------------------------------------------------------------------------------------------------------

FRAMES = {
    "pandas": lambda columns: lib("pandas").DataFrame(columns),
    "polars": lambda columns: lib("polars").DataFrame(columns),
    "pyarrow": lambda columns: lib("pyarrow").table(columns),
    "pyarrow batch": lambda columns: lib("pyarrow").record_batch(columns),
    "narwhals": lambda columns: lib("narwhals").from_native(lib("polars").DataFrame(columns)),
    "xarray": lambda columns: lib("xarray").Dataset({name: ("i", column) for name, column in columns.items()}),
    "dict": dict,
    "proxy": types.MappingProxyType,
    "lazy view": lambda columns: dlx.convert(columns, to="dlx", lazy=True),
}


@pytest.mark.parametrize("to", ["numpy", "torch"])
@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_is_stacked_by_its_columns(name, to):
    """Each column is one row, in order; the error names a column that differs."""
    lib(to)
    columns = {"b": np.arange(3.0), "a": np.arange(3.0) * 2, "c": np.ones(3)}
    result = dlx.stack(FRAMES[name](columns), to=to)
    assert result.tolist() == [[0, 1, 2], [0, 2, 4], [1, 1, 1]]
    error = refused(lambda: dlx.stack(FRAMES[name](columns | {"a": np.arange(3)}), to=to))
    assert error.where == "arrays['a']" and "arrays['b']" in error.reason
    error = refused(lambda: dlx.stack(FRAMES[name](columns | {"c": np.array(["x", "y", "z"])}), to=to))
    assert error.where == "arrays['c']"


def test_a_mapping_that_fails_is_refused(tmp_path):
    """It is refused with an error of dlx that has its cause."""
    file = _npz(tmp_path)
    file.close()
    error = refused(lambda: dlx.stack(file, to="dlx"))
    assert "cannot be flattened" in error.reason and error.__cause__ is not None


@pytest.mark.parametrize("name", ["torch module", "polars LazyFrame"])
def test_what_holds_arrays_and_gives_none_is_refused_by_name(name, tmp_path):
    """The error has dlx's fix, not the library's failure to iterate."""
    make, word = HOLDERS[name]
    obj = make(tmp_path)
    error = refused(lambda: dlx.stack(obj, to="dlx"))
    assert isinstance(error, errors.AdapterNotFoundError) and word in error.fix and error.action == "stack"


def test_what_a_generator_raises_is_its_own():
    """A generator's exception propagates unchanged, even a TypeError."""

    def arrays():
        yield np.ones(1)
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        dlx.stack(arrays(), to="dlx")


def test_an_empty_frame_has_nothing_to_stack():
    """The error is the same as for an empty list."""
    for empty in ({}, []):
        with pytest.raises(ValueError, match="at least one"):
            dlx.stack(empty, to="dlx")


# ---- numbers, strictly -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "numbers", [[1, 2, 3], (1.5,), [[1, 2], [3, 4]], {"a": 1, "b": "x"}, [None, "x", "y", "z", 1j]]
)
def test_numbers_without_an_array_are_refused_strictly(numbers):
    """They aren't arrays, and would be returned unchanged."""
    error = refused(lambda: dlx.convert(numbers, to="dlx", strict=True))
    assert "numpy.array" in error.fix and "no array" in error.reason and error.where == ""
    assert same(dlx.plan(numbers, to="dlx", strict=True).error, error)
    assert dlx.convert(numbers, to="dlx") == numbers
    with pytest.raises(ExceptionGroup):
        dlx.convert(numbers, to="dlx", strict=True, errors="collect")


def test_data_without_numbers_passes_strictly():
    """It passes through like numbers next to an array."""
    for data in ([], {"a": "x"}, [None, b"x"], [1, dlx.empty(1, "int8")]):
        assert dlx.convert(data, to="dlx", strict=True) == data


@pytest.mark.parametrize(
    ("module", "kind", "values"),
    [
        ("PIL.Image", "Image", [[1, 2]]),
        ("pandas", "Series", [1]),
        ("polars", "Series", [1]),
        ("xarray", "DataArray", [1]),
    ],
)
def test_a_source_that_is_no_target_is_named_with_the_call_that_makes_one(np, module, kind, values):
    """By name, module and type; the call works."""
    library = pytest.importorskip(module)
    root = module.partition(".")[0]
    x = np.array(values, "uint8")
    for to in (root, library, getattr(library, kind)):
        with pytest.raises(dlx.errors.AdapterNotFoundError, match=f"'{root}' is a source, but not a target") as caught:
            dlx.convert(x, to=to)
    call = caught.value.fix.removeprefix("Call ").removesuffix(".")
    made = eval(call, {root: importlib.import_module(root), "dlx": dlx, "x": x})
    assert np.asarray(made).tolist() == values
    with pytest.raises(dlx.errors.AdapterNotFoundError, match=f"'{root}' is a source, but not a target"):
        dlx.convert(x, like=made)
