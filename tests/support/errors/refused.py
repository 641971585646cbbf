"""Objects that dlx refuses, each with its library; tests try the errors' advice on them."""

from __future__ import annotations

import datetime
import decimal
import itertools
import sys
from importlib import import_module
from typing import Any, NamedTuple

NAMES = {"np": "numpy", "pa": "pyarrow", "pd": "pandas", "pl": "polars", "tf": "tensorflow", "xr": "xarray"}
"""The usual name of a module, and the module."""


class Case(NamedTuple):
    """One refused object.

    `make` receives the modules by the names that users give them. `works`: dlx converts the result of the advice.
    `action` is the function of dlx that refuses it, with `options`.
    """

    needs: str
    make: Any
    works: bool = True
    to: str = "dlx"
    action: str = "convert"
    options: dict[str, Any] = {}  # noqa: RUF012


def modules(needs: str, import_or_skip: Any = import_module) -> dict[str, Any]:
    """Return the modules that a case needs, by the names that users give them."""
    for name in needs.split():
        import_or_skip(NAMES.get(name, name))
    roots = {name.partition(".")[0] for name in needs.split()}
    return {root: sys.modules[NAMES.get(root, root)] for root in roots}


NUMBERS = itertools.count()
DAY = datetime.date(2026, 11, 25)
TIME = datetime.datetime(2026, 11, 25)


def _layout(fmt):
    return lambda torch: getattr(torch.eye(4), f"to_sparse_{fmt}")()


CASES: dict[str, Case] = {
    # ---- numpy
    "numpy object": Case("np", lambda np: np.array([1, None], dtype=object), works=False),
    "numpy object of numbers": Case("np", lambda np: np.array([1, 2.5], dtype=object)),
    "numpy object of rows": Case("np", lambda np: rows(np, [[1, 2], [3, 4]])),
    "numpy object of ragged rows": Case("np", lambda np: rows(np, [[1, 2], [3]]), works=False),
    "numpy text": Case("np", lambda np: np.array(["a", "b"])),
    "numpy bytes": Case("np", lambda np: np.array([b"a", b"b"])),
    "numpy complex to real": Case("np", lambda np: np.ones(2, "c8"), options={"dtype": {"complex64": "float32"}}),
    "numpy void": Case("np", lambda np: np.zeros(2, "V4")),
    "numpy str scalar": Case("np", lambda np: np.array(["a"])[0], works=False),
    "numpy StringDType": Case("np", lambda np: np.array(["a", "b"], dtype=np.dtypes.StringDType())),
    "numpy dates": Case("np", lambda np: np.array(["2026-11-25"], "M8[D]")),
    "numpy durations": Case("np", lambda np: np.array([1], "m8[s]")),
    "numpy date scalar": Case("np", lambda np: np.datetime64("2026-11-25")),
    "numpy structure": Case("np", lambda np: np.zeros(2, [("x", "f4"), ("y", "f4")])),
    "numpy structure scalar": Case("np", lambda np: np.zeros(2, [("x", "f4"), ("y", "f4")])[0]),
    "numpy record": Case("np", lambda np: np.rec.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f4")])),
    "numpy structure of objects": Case("np", lambda np: np.zeros(2, "i4,O")),
    "numpy empty structure": Case("np", lambda np: np.zeros(2, []), works=False),
    "numpy long double": Case("np", lambda np: np.ones(2, np.longdouble)),
    "numpy complex long double": Case("np", lambda np: np.ones(2, np.clongdouble)),
    "elements of an unknown library": Case("np", lambda np: Elements()),
    "numpy masked": Case("np", lambda np: np.ma.array([1, 2], mask=[0, 1])),
    "numpy masked constant": Case("np", lambda np: np.ma.masked),
    "astropy quantity": Case("astropy.units np", lambda astropy, np: np.ones(2) * astropy.units.m),
    "astropy masked column": Case("astropy.table", lambda astropy: astropy.table.MaskedColumn([1, 2], mask=[0, 1])),
    "astropy column with a unit": Case("astropy.table", lambda astropy: astropy.table.Column([1.0, 2.0], unit="m")),
    "astropy time": Case("astropy.time", lambda astropy: astropy.time.Time(["2026-01-01", "2026-01-02"]), works=False),
    "astropy table": Case("astropy.table", lambda astropy: astropy.table.Table({"a": [1, 2]})),
    "astropy table with a mask": Case(
        "astropy.table", lambda astropy: astropy.table.Table({"a": [1, 2]}, masked=True), works=False
    ),
    "pint quantity": Case("pint np", lambda pint, np: np.ones(2) * pint.UnitRegistry().meter),
    "quantities": Case("quantities", lambda quantities: quantities.Quantity([1.0, 2.0], "m")),
    # ---- torch
    "torch coo": Case("torch", lambda torch: torch.eye(3).to_sparse()),
    "torch coo with gradients": Case(
        "torch scipy.sparse",
        lambda torch, scipy: torch.sparse_coo_tensor(
            torch.zeros((2, 2), dtype=torch.int64), torch.ones(2), requires_grad=True
        ),
        works=False,  # dlx has no sparse array of its own
        action="parts",
    ),
    "torch csr": Case("torch", _layout("csr")),
    "torch csc": Case("torch", _layout("csc")),
    "torch bsr": Case("torch", lambda torch: torch.eye(4).to_sparse_bsr((2, 2))),
    "torch gradients": Case("torch", lambda torch: torch.ones(2, requires_grad=True), works=False),
    "torch meta": Case("torch", lambda torch: torch.ones(2, device="meta"), works=False),
    "torch nested": Case("torch", lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "torch jagged": Case(
        "torch", lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    ),
    "torch quantized": Case("torch", lambda torch: quantized(torch)),
    "torch float4 to numpy": Case("torch", lambda torch: pairs(torch), to="numpy"),
    "torch float4 to jax": Case("torch jax", lambda torch, jax: pairs(torch), to="jax"),
    "numpy float4 to torch": Case(
        "np ml_dtypes torch", lambda np, ml_dtypes, torch: float4(np), works=False, to="torch"
    ),
    "jax float4 to torch": Case(
        "jax.numpy np ml_dtypes torch", lambda jax, np, **_: jax.numpy.asarray(float4(np)), works=False, to="torch"
    ),
    "torch fake": Case("torch torch._subclasses", lambda torch: fake(torch), works=False),
    "torch bits": Case("torch", lambda torch: torch.zeros(2, dtype=torch.uint8).view(torch.bits8)),
    "torch lazy": Case("torch", lambda torch: torch.nn.LazyLinear(2).weight, works=False),
    "torch module": Case("torch", lambda torch: torch.nn.Linear(2, 2).requires_grad_(False)),
    "numpy iterator": Case("np", lambda np: np.nditer(np.ones(2)), works=False),
    "torch storage": Case("torch", lambda torch: torch.ones(2).untyped_storage(), works=False),
    # ---- jax
    "jax bcoo": Case(
        "jax jax.experimental.sparse jax.numpy", lambda jax: jax.experimental.sparse.BCOO.fromdense(jax.numpy.eye(3))
    ),
    "jax bcsr": Case(
        "jax jax.experimental.sparse jax.numpy", lambda jax: jax.experimental.sparse.BCSR.fromdense(jax.numpy.eye(3))
    ),
    "jax key": Case("jax", lambda jax: jax.random.key(0)),
    "jax ref": Case("jax jax.numpy", lambda jax: jax.new_ref(jax.numpy.ones(2))),
    "jax deleted": Case("jax jax.numpy", lambda jax: deleted(jax), works=False),
    "jax float0": Case("jax np", lambda jax, np: np.zeros(2, jax.dtypes.float0), works=False),
    "jax struct": Case("jax np", lambda jax, np: jax.ShapeDtypeStruct((2,), np.float32), works=False),
    # ---- pyarrow
    **{
        f"pyarrow {name}": Case("pa", make, works=name not in ("intervals", "uuid"))
        for name, make in {
            "nulls": lambda pa: pa.array([1, None]),
            "chunks of nulls": lambda pa: pa.chunked_array([pa.array([1, None])]),
            "text": lambda pa: pa.array(["a"]),
            "chunks of text": lambda pa: pa.chunked_array([pa.array(["a"])]),
            "large text": lambda pa: pa.array(["a"], pa.large_string()),
            "text view": lambda pa: pa.array(["a"], pa.string_view()),
            "bytes": lambda pa: pa.array([b"a"]),
            "fixed bytes": lambda pa: pa.array([b"ab"], pa.binary(2)),
            "dates": lambda pa: pa.array([DAY]),
            "chunks of dates": lambda pa: pa.chunked_array([pa.array([DAY])]),
            "date64": lambda pa: pa.array([DAY], pa.date64()),
            "times": lambda pa: pa.array([TIME]),
            "time32": lambda pa: pa.array([1], pa.time32("s")),
            "time64": lambda pa: pa.array([1], pa.time64("us")),
            "durations": lambda pa: pa.array([1], pa.duration("s")),
            "intervals": lambda pa: pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
            "decimals": lambda pa: pa.array([decimal.Decimal("1.5")]),
            "chunks of decimals": lambda pa: pa.chunked_array([pa.array([decimal.Decimal("1.5")])]),
            "dictionary": lambda pa: pa.array(["a", "b"]).dictionary_encode(),
            "chunks of dictionary": lambda pa: pa.chunked_array([pa.array(["a", "b"]).dictionary_encode()]),
            "lists": lambda pa: pa.array([[1, 2], [3]]),
            "chunks of lists": lambda pa: pa.chunked_array([pa.array([[1, 2], [3]])]),
            "equal lists": lambda pa: pa.array([[1, 2], [3, 4]]),
            "chunks of equal lists": lambda pa: pa.chunked_array([pa.array([[1, 2], [3, 4]])]),
            "large lists": lambda pa: pa.array([[1, 2], [3]], pa.large_list(pa.int64())),
            "list views": lambda pa: pa.array([[1, 2], [3]], pa.list_view(pa.int64())),
            "maps": lambda pa: pa.array([[(1, 2)]], pa.map_(pa.int64(), pa.int64())),
            "structures": lambda pa: pa.array([{"a": 1}]),
            "chunks of structures": lambda pa: pa.chunked_array([pa.array([{"a": 1}])]),
            "unions": lambda pa: pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]),
            "chunks of unions": lambda pa: pa.chunked_array(
                [pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])]
            ),
            "run ends": lambda pa: pa.RunEndEncodedArray.from_arrays([2], [1.5]),
            "only nulls": lambda pa: pa.array([None]),
            "chunks of only nulls": lambda pa: pa.chunked_array([pa.array([None])]),
            "fixed lists with null rows": lambda pa: pa.array([[1, 2], None], pa.list_(pa.int64(), 2)),
            "fixed lists with nulls": lambda pa: pa.array([[1, None]], pa.list_(pa.int64(), 2)),
            "chunks of fixed lists with nulls": lambda pa: pa.chunked_array(
                [pa.array([[1, None]], pa.list_(pa.int64(), 2))]
            ),
            "lists of text": lambda pa: pa.array([["a"]], pa.list_(pa.string(), 1)),
            "lists of lists of text": lambda pa: pa.array([[["a"]]], pa.list_(pa.list_(pa.string(), 1), 1)),
            "lists of dates": lambda pa: pa.array([[DAY]], pa.list_(pa.date32(), 1)),
            "lists of decimals": lambda pa: pa.array([[decimal.Decimal("1.5")]], pa.list_(pa.decimal128(5, 1), 1)),
            "lists of lists": lambda pa: pa.array([[[1]]], pa.list_(pa.list_(pa.int64()), 1)),
            "chunks of lists of text": lambda pa: pa.chunked_array([pa.array([["a"]], pa.list_(pa.string(), 1))] * 2),
            "bool8": lambda pa: pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1], pa.int8())),
            "uuid": lambda pa: pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"a" * 16], pa.binary(16))),
        }.items()
    },
    "pyarrow scalar": Case("pa", lambda pa: pa.scalar(1), works=False),
    "pyarrow sparse": Case("pa np", lambda pa, np: pa.SparseCOOTensor.from_dense_numpy(np.eye(3))),
    "pyarrow csr": Case("pa np", lambda pa, np: pa.SparseCSRMatrix.from_dense_numpy(np.eye(3))),
    "pyarrow reader": Case("pa", lambda pa: pa.table({"a": [1]}).to_reader()),
    "pyarrow parquet": Case("pa pyarrow.parquet", lambda pa, pyarrow: parquet(pa, pyarrow), works=False),
    "pyarrow dataset": Case(
        "pa pyarrow.dataset", lambda pa, pyarrow: pyarrow.dataset.dataset(pa.table({"a": [1]})), works=False
    ),
    "pyarrow schema": Case("pa", lambda pa: pa.schema({"a": pa.int64()}), works=False),
    # ---- pandas
    "pandas objects": Case("pd", lambda pd: pd.Series([1, None], dtype=object), works=False),
    "pandas objects of numbers": Case("pd", lambda pd: pd.Series([1, 2], dtype=object)),
    "pandas objects of rows": Case("pd", lambda pd: pd.Series([[1, 2], [3, 4]])),
    "pandas objects of arrays": Case("pd np", lambda pd, np: pd.Series([np.ones(2), np.ones(2)])),
    "pandas text": Case("pd", lambda pd: pd.Series(["a", "b"])),
    "pandas categories": Case("pd", lambda pd: pd.Series(["a", "b"], dtype="category")),
    "pandas dates": Case("pd", lambda pd: pd.Series([TIME])),
    "pandas dates with a zone": Case("pd", lambda pd: pd.Series([TIME]).dt.tz_localize("UTC")),
    "pandas durations": Case("pd", lambda pd: pd.Series([datetime.timedelta(1)])),
    "pandas periods": Case("pd", lambda pd: pd.Series(pd.period_range("2026", periods=2, freq="D"))),
    "pandas intervals": Case("pd", lambda pd: pd.Series(pd.interval_range(0, 2))),
    "pandas nulls": Case("pd", lambda pd: pd.Series([1, None], dtype="Int64")),
    "pandas sparse": Case("pd np", lambda pd, np: pd.Series(pd.arrays.SparseArray([0.0, 1.0]))),
    "pandas long double": Case("pd np", lambda pd, np: pd.Series(np.ones(2, np.longdouble))),
    "pandas big-endian": Case("pd np", lambda pd, np: pd.Series(np.ones(2, ">f4"))),
    **{
        f"pandas arrow {name}": Case("pd pa", make)
        for name, make in {
            "nulls": lambda pd, pa: arrowed(pd, pa, [1, None]),
            "text": lambda pd, pa: arrowed(pd, pa, ["a"]),
            "bytes": lambda pd, pa: arrowed(pd, pa, [b"a"]),
            "dates": lambda pd, pa: arrowed(pd, pa, [DAY]),
            "times": lambda pd, pa: arrowed(pd, pa, [TIME]),
            "durations": lambda pd, pa: arrowed(pd, pa, [1], pa.duration("s")),
            "decimals": lambda pd, pa: arrowed(pd, pa, [decimal.Decimal("1.5")]),
            "lists": lambda pd, pa: arrowed(pd, pa, [[1, 2], [3]]),
            "structures": lambda pd, pa: arrowed(pd, pa, [{"a": 1}]),
            "dictionary": lambda pd, pa: arrowed(pd, pa, ["a"], pa.dictionary(pa.int32(), pa.string())),
            "only nulls": lambda pd, pa: arrowed(pd, pa, [None], pa.null()),
        }.items()
    },
    "pandas list views": Case("pd pa", lambda pd, pa: arrowed(pd, pa, [[1, 2], [3]], pa.list_view(pa.int64()))),
    "pandas frame with lists": Case(
        "pd pa", lambda pd, pa: pd.DataFrame({"a": arrowed(pd, pa, [[1, 2], [3]])}), action="stack"
    ),
    "pandas index": Case("pd", lambda pd: pd.Index([1, 2])),
    "pandas datetime index": Case("pd", lambda pd: pd.DatetimeIndex([TIME]), works=False),
    "pandas multi-index": Case("pd", lambda pd: pd.MultiIndex.from_tuples([(1, 2)]), works=False),
    "pandas array": Case("pd", lambda pd: pd.array([1, 2], dtype="Int64")),
    "pandas array with nulls": Case("pd", lambda pd: pd.array([1, None], dtype="Int64"), works=False),
    "pandas categorical": Case("pd", lambda pd: pd.Categorical(["a", "b"])),
    "pandas groups": Case("pd", lambda pd: pd.DataFrame({"a": [1]}).groupby("a"), works=False),
    # ---- polars
    "polars frame with lists": Case("pl", lambda pl: pl.DataFrame({"a": [[1, 2], [3]]}), action="stack"),
    **{
        f"polars {name}": Case("pl", make)
        for name, make in {
            "nulls": lambda pl: pl.Series([1, None]),
            "text": lambda pl: pl.Series(["a", "b"]),
            "bytes": lambda pl: pl.Series([b"a"]),
            "categories": lambda pl: pl.Series(["a"], dtype=pl.Categorical),
            "enum": lambda pl: pl.Series(["a"], dtype=pl.Enum(["a"])),
            "dates": lambda pl: pl.Series([DAY]),
            "times": lambda pl: pl.Series([TIME]),
            "time": lambda pl: pl.Series([datetime.time(1)]),
            "durations": lambda pl: pl.Series([datetime.timedelta(1)]),
            "decimals": lambda pl: pl.Series([decimal.Decimal("1.5")]),
            "lists": lambda pl: pl.Series([[1, 2], [3]]),
            "equal lists": lambda pl: pl.Series([[1, 2], [3, 4]]),
            "only nulls": lambda pl: pl.Series([None]),
            "fixed lists with null rows": lambda pl: pl.Series([[1, 2], None], dtype=pl.Array(pl.Int64, 2)),
            "fixed lists with nulls": lambda pl: pl.Series([[1, None]], dtype=pl.Array(pl.Int64, 2)),
            "lists of text": lambda pl: pl.Series([["a"]], dtype=pl.Array(pl.String, 1)),
            "lists of dates": lambda pl: pl.Series([[DAY]], dtype=pl.Array(pl.Date, 1)),
            "lists of decimals": lambda pl: pl.Series([[decimal.Decimal("1.5")]], dtype=pl.Array(pl.Decimal(5, 1), 1)),
            "lists of structures": lambda pl: pl.Series([[{"a": 1}]], dtype=pl.Array(pl.Struct({"a": pl.Int64}), 1)),
            "int128": lambda pl: pl.Series([1], dtype=pl.Int128),
        }.items()
    },
    "polars objects": Case("pl", lambda pl: pl.Series([object()], dtype=pl.Object), works=False),
    "polars lazy": Case("pl", lambda pl: pl.LazyFrame({"a": [1]})),
    "polars groups": Case("pl", lambda pl: pl.DataFrame({"a": [1]}).group_by("a"), works=False),
    # ---- others with Arrow's interface
    "nanoarrow nulls": Case("nanoarrow", lambda nanoarrow: nanoarrow.Array([1, None], nanoarrow.int64())),
    "nanoarrow text": Case("nanoarrow", lambda nanoarrow: nanoarrow.Array(["a"], nanoarrow.string())),
    "nanoarrow dates": Case("nanoarrow pa", lambda nanoarrow, pa: nanoarrow.Array(pa.array([DAY]))),
    "nanoarrow lists": Case("nanoarrow pa", lambda nanoarrow, pa: nanoarrow.Array(pa.array([[1], [2, 3]]))),
    "nanoarrow decimals": Case(
        "nanoarrow pa", lambda nanoarrow, pa: nanoarrow.Array(pa.array([decimal.Decimal("1.5")]))
    ),
    "nanoarrow dictionary": Case(
        "nanoarrow pa", lambda nanoarrow, pa: nanoarrow.Array(pa.array(["a"]).dictionary_encode())
    ),
    "nanoarrow unions": Case(
        "nanoarrow pa",
        lambda nanoarrow, pa: nanoarrow.Array(pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])),
    ),
    "nanoarrow only nulls": Case("nanoarrow pa", lambda nanoarrow, pa: nanoarrow.Array(pa.array([None]))),
    "narwhals nulls": Case(
        "narwhals pl", lambda narwhals, pl: narwhals.from_native(pl.Series([1, None]), series_only=True)
    ),
    "narwhals text": Case("narwhals pl", lambda narwhals, pl: narwhals.from_native(pl.Series(["a"]), series_only=True)),
    "narwhals lists": Case(
        "narwhals pl", lambda narwhals, pl: narwhals.from_native(pl.Series([[1], [2, 3]]), series_only=True)
    ),
    "narwhals dates": Case(
        "narwhals pl", lambda narwhals, pl: narwhals.from_native(pl.Series([DAY]), series_only=True)
    ),
    "narwhals categories": Case(
        "narwhals pl",
        lambda narwhals, pl: narwhals.from_native(pl.Series(["a"], dtype=pl.Categorical), series_only=True),
    ),
    "narwhals lazy": Case("narwhals pl", lambda narwhals, pl: narwhals.from_native(pl.LazyFrame({"a": [1]}))),
    "duckdb relation with nulls": Case("duckdb", lambda duckdb: duckdb.sql("select NULL::int as a")),
    "duckdb relation with text": Case("duckdb", lambda duckdb: duckdb.sql("select 'x' as a")),
    "duckdb relation with decimals": Case("duckdb", lambda duckdb: duckdb.sql("select 1.5 as a")),
    "duckdb relation with hugeint": Case("duckdb", lambda duckdb: duckdb.sql("select sum(1) as a")),
    "duckdb relation with dates": Case("duckdb", lambda duckdb: duckdb.sql("select DATE '2026-11-25' as a")),
    "duckdb relation with lists": Case("duckdb", lambda duckdb: duckdb.sql("select [1] as a")),
    "duckdb connection": Case("duckdb", lambda duckdb: duckdb.connect(), works=False),
    "geopandas frame": Case(
        "geopandas shapely",
        lambda geopandas, shapely: geopandas.GeoDataFrame({"a": [1]}, geometry=[shapely.Point(1, 2)]),
    ),
    "geopandas series": Case(
        "geopandas shapely", lambda geopandas, shapely: geopandas.GeoSeries([shapely.Point(1, 2)])
    ),
    "geometry in a Series": Case(
        "geopandas shapely pd", lambda geopandas, shapely, pd: pd.Series(geopandas.GeoSeries([shapely.Point(1, 2)]))
    ),
    "geoarrow": Case(
        "geopandas shapely", lambda geopandas, shapely: geopandas.GeoSeries([shapely.Point(1, 2)]).to_arrow()
    ),
    "geoarrow table": Case(
        "geopandas shapely",
        lambda geopandas, shapely: geopandas.GeoDataFrame(geometry=[shapely.Point(1, 2)]).to_arrow(),
    ),
    "datasets": Case("datasets", lambda datasets: datasets.Dataset.from_dict({"x": [1.0, 2.0]})),
    "datasets lists": Case("datasets", lambda datasets: datasets.Dataset.from_dict({"x": [[1, 2], [3, 4]]}).data.table),
    "datasets Array2D": Case("datasets", lambda datasets: array2d(datasets).data.table),
    "datasets iterable": Case(
        "datasets", lambda datasets: datasets.Dataset.from_dict({"x": [1.0]}).to_iterable_dataset(), works=False
    ),
    "datasets column": Case("datasets", lambda datasets: datasets.Dataset.from_dict({"x": [1.0]})["x"], works=False),
    # ---- array-likes
    "scipy csr": Case("scipy.sparse np", lambda scipy, np: scipy.sparse.csr_array(np.eye(3))),
    "scipy coo": Case("scipy.sparse np", lambda scipy, np: scipy.sparse.coo_array(np.eye(3))),
    "scipy dia": Case("scipy.sparse np", lambda scipy, np: scipy.sparse.dia_array(np.eye(3))),
    "scipy lil": Case("scipy.sparse np", lambda scipy, np: scipy.sparse.lil_array(np.eye(3))),
    "scipy dok": Case("scipy.sparse np", lambda scipy, np: scipy.sparse.dok_array(np.eye(3))),
    "scipy csr matrix": Case("scipy.sparse np", lambda scipy, np: scipy.sparse.csr_matrix(np.eye(3))),
    "scipy operator": Case(
        "scipy.sparse.linalg np", lambda scipy, np: scipy.sparse.linalg.aslinearoperator(np.eye(3)), works=False
    ),
    "scipy csr with an index twice": Case(
        "scipy.sparse np torch",
        lambda scipy, np, torch: scipy.sparse.csr_array((np.ones(2), np.ones(2, int), np.array([0, 2])), shape=(1, 3)),
        works=False,  # the call changes the array itself
        to="torch",
    ),
    "sparse": Case("sparse np", lambda sparse, np: sparse.COO.from_numpy(np.eye(3))),
    "sparse gcxs": Case("sparse np", lambda sparse, np: sparse.GCXS.from_numpy(np.eye(3))),
    "sparse dok": Case("sparse np", lambda sparse, np: sparse.DOK.from_numpy(np.eye(3))),
    "awkward": Case("awkward", lambda awkward: awkward.Array([[1, 2], [3, 4]])),
    "awkward ragged": Case("awkward", lambda awkward: awkward.Array([[1, 2], [3]])),
    "awkward record": Case("awkward", lambda awkward: awkward.Array([{"a": 1}]), works=False),
    "zarr array": Case("zarr np", lambda zarr, np: zarr.array(np.ones(3))),
    "zarr group": Case("zarr np", lambda zarr, np: zarr_group(zarr, np)),
    "xarray dataset of text": Case("xr", lambda xr: xr.Dataset({"a": ("x", ["b"])}), works=False),
    "xarray tree": Case(
        "xr np", lambda xr, np: xr.DataTree.from_dict({"/": xr.Dataset({"a": ("x", np.ones(2))})}), works=False
    ),
    "dask array": Case("dask.array", lambda dask: dask.array.ones(3), to="dlx"),
    "dask frame": Case(
        "dask.dataframe pd", lambda dask, pd: dask.dataframe.from_pandas(pd.DataFrame({"a": [1]}), npartitions=1)
    ),
    "dask delayed": Case("dask", lambda dask: dask.delayed(1), works=False),
    "opencv UMat": Case("cv2 np", lambda cv2, np: cv2.UMat(np.ones((2, 2), np.uint8))),
    "anndata sparse dataset": Case(
        "anndata.io h5py scipy.sparse np",
        lambda anndata, h5py, scipy, np: sparse_dataset(anndata, h5py, scipy.sparse.csr_array(np.eye(3))),
        works=False,  # dlx has no sparse array of its own
    ),
    "anndata": Case("anndata np", lambda anndata, np: anndata.AnnData(np.ones((2, 2), np.float32)), works=False),
    "openvino text": Case("openvino", lambda openvino: openvino.Tensor(["a", "b"]), works=False),
    "openvino half bytes": Case("openvino", lambda openvino: openvino.Tensor(openvino.Type.u4, [4])),
    "sklearn": Case("sklearn.linear_model", lambda sklearn: sklearn.linear_model.LinearRegression(), works=False),
    "transformers config": Case("transformers", lambda transformers: transformers.PretrainedConfig(), works=False),
    "netCDF4": Case("netCDF4", lambda netCDF4: netcdf(netCDF4)),
    "h5py text": Case("h5py", lambda h5py: h5(h5py, ["a"]), works=False),
    "tensorflow sparse": Case("tf", lambda tf: tf.sparse.eye(3)),
    "tensorflow ragged": Case("tf", lambda tf: tf.ragged.constant([[1, 2], [3]])),
    "tensorflow text": Case("tf", lambda tf: tf.constant(["a"]), works=False),
    "tensorflow list": Case("tf", lambda tf: tf.TensorArray(tf.float32, size=1).write(0, 1.0)),
    "paddle sparse": Case("paddle", lambda paddle: paddle.eye(3).to_sparse_coo(2)),
    "warp strides": Case("np warp", lambda np, warp: partial_strides(np, warp)),
    "python numbers": Case("np", lambda np: 1, works=False),
    "python text": Case("np", lambda np: "a.npy", works=False),
    "python dict view": Case("np", lambda np: {"a": 1}.values(), works=False),
    "generator": Case("np", lambda np: (np.ones(2) for _ in range(2)), works=False),
}


def pairs(torch):
    """Return float4 values, two to an element."""
    return torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


def float4(np):
    """Return float4 values, one to an element."""
    return np.array([1, 2, 3, -6], import_module("ml_dtypes").float4_e2m1fn)


def rows(np, values):
    """Return an object array of rows."""
    made = np.empty(len(values), object)
    for i, row in enumerate(values):
        made[i] = np.array(row)
    return made


def quantized(torch):
    """Return a quantized tensor."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def fake(torch):
    """Return a tensor without data."""
    with torch._subclasses.FakeTensorMode():
        return torch.ones(2)


def deleted(jax):
    """Return a deleted array, without memory."""
    made = jax.numpy.ones(2) + 1
    made.delete()
    return made


def parquet(pa, pyarrow):
    """Return an open Parquet file."""
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.table({"a": [1]}), sink)
    return pyarrow.parquet.ParquetFile(pa.BufferReader(sink.getvalue()))


def sparse_dataset(anndata, h5py, array):
    """Return a sparse array in an HDF5 file in memory."""
    file = h5py.File(f"sparse {next(NUMBERS)}", "w", driver="core", backing_store=False)
    anndata.io.write_elem(file, "x", array)
    return anndata.io.sparse_dataset(file["x"])


class Elements:
    """Looks like an array of its own library, and gives numpy's arrays for subscripts."""

    shape, ndim, dtype = (2,), 1, "float32"

    def __getitem__(self, index):
        return import_module("numpy").ones(2, "f4")


def arrowed(pd, pa, values, kind=None):
    """Return a Series of a dtype of pyarrow."""
    return pd.Series(values, dtype=pd.ArrowDtype(kind or pa.array(values).type))


def array2d(datasets):
    """Return a dataset with a column of matrices."""
    features = datasets.Features({"x": datasets.Array2D((2, 2), "int64")})
    return datasets.Dataset.from_dict({"x": [[[1, 2], [3, 4]]]}, features=features)


def zarr_group(zarr, np):
    """Return a group with one array."""
    group = zarr.group()
    group["a"] = np.ones(3)
    return group


def netcdf(netCDF4):
    """Return a variable of a file in memory."""
    file = netCDF4.Dataset(f"{next(NUMBERS)}.nc", "w", diskless=True)
    file.createDimension("x", 2)
    made = file.createVariable("a", "f4", ("x",))
    made[:] = 1
    return made


def h5(h5py, value):
    """Return a dataset of a file in memory."""
    file = h5py.File(f"{next(NUMBERS)}.h5", "w", driver="core", backing_store=False)
    return file.create_dataset("a", data=value)


def partial_strides(np, warp):
    """Return an array of warp whose strides are one and a half elements."""
    memory = np.zeros(24, "u1")
    options = {"dtype": warp.float32, "shape": (3,), "strides": (6,), "device": "cpu", "copy": False}
    return warp.array(ptr=memory.ctypes.data, **options, deleter=lambda address, nbytes, kept=memory: None)
