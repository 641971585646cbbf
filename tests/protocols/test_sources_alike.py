"""Rules for all sources: Arrow columns of each installed library, labelled arrays, saved files."""

from __future__ import annotations

import warnings

import pytest
from support.files.writers import gguf

import dlx
from dlx import errors

np = pytest.importorskip("numpy")


def library(name):
    """Import a library, or skip."""
    return pytest.importorskip(name)


def _npy(a, folder):
    np.save(folder / "x.npy", a)
    return next(iter(dlx.open(folder / "x.npy").values()))


def _npz(a, folder):
    np.savez(folder / "x.npz", x=a)
    return dlx.open(folder / "x.npz")["x"]


def _safetensors(a, folder):
    library("safetensors.numpy").save_file({"x": np.array(a, order="C")}, folder / "x.safetensors")
    return dlx.open(folder / "x.safetensors")["x"]


def _hdf5(a, folder):
    with library("h5py").File(folder / "x.h5", "w") as file:
        file["x"] = a
    return dlx.open(folder / "x.h5")["x"]


def _gguf(a, folder):
    extents = a.shape[::-1]  # the last one varies fastest
    (folder / "x.gguf").write_bytes(gguf({"x": (28, extents, a.tobytes())}))
    return dlx.open(folder / "x.gguf")["x"]


def _checkpoint(a, folder):
    torch = library("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # read-only arrays
        torch.save({"x": torch.from_numpy(a)}, folder / "x.pt")
    return dlx.open(folder / "x.pt")["x"]


def _ipc(a, folder):
    pa = library("pyarrow")
    table = pa.table({"x": pa.array(a)})
    with pa.ipc.new_file(str(folder / "x.arrow"), table.schema) as sink:
        sink.write_table(table)
    return dlx.open(folder / "x.arrow")["x"]


COLUMNS = {
    "pyarrow": lambda a, _: library("pyarrow").array(a),
    "pyarrow chunked": lambda a, _: library("pyarrow").chunked_array([a]),
    "pandas": lambda a, _: library("pandas").Series(a),
    "pandas of pyarrow": lambda a, _: library("pyarrow") and library("pandas").Series(a, dtype="double[pyarrow]"),
    "polars": lambda a, _: library("polars").Series(a),
    "nanoarrow": lambda a, _: library("nanoarrow").Array(a.tolist(), library("nanoarrow").float64()),
    "narwhals of polars": lambda a, _: library("narwhals").from_native(library("polars").Series(a), series_only=True),
    "Arrow IPC": _ipc,
}
FILES = {"npy": _npy, "npz": _npz, "safetensors": _safetensors, "hdf5": _hdf5, "gguf": _gguf, "pt": _checkpoint}
ARRAYS = {"xarray": lambda a, _: library("xarray").DataArray(a), "dlx.Tensor": lambda a, _: dlx.from_dlpack(a), **FILES}
SOURCES = COLUMNS | ARRAYS
WRITABLE = ("xarray", "dlx.Tensor", "pt")  # like the wrapped array; a checkpoint's pages are private


def out(source, **options):
    """Return a source as an array; xarray objects stay unchanged for numpy."""
    result = dlx.convert(source, to="numpy", **options)
    return getattr(result, "data", result) if type(result) is not np.ndarray else result


@pytest.fixture(params=SOURCES)
def make(request, tmp_path):
    """Return a function that creates a source from an array."""
    return lambda a: SOURCES[request.param](a, tmp_path)


def test_sharing_read_only_and_copies(make, request):
    """The memory is shared, read-only by default; copy=True copies it."""
    base = np.arange(6.0)
    source = make(base)
    shared = [out(source, copy=False) for _ in range(2)]
    assert shared[0].tolist() == base.tolist() and shared[0].ctypes.data == shared[1].ctypes.data
    writable = any(f"[{name}]" in request.node.name for name in WRITABLE)
    assert shared[0].flags.writeable is writable
    copied = out(source, copy=True)
    assert copied.tolist() == base.tolist() and copied.ctypes.data != shared[0].ctypes.data and copied.flags.writeable


def test_read_only_memory_reaches_no_writer(make, request):
    """Torch has no read-only tensors: it gets a copy, or an error."""
    library("torch")
    if "[pt]" in request.node.name:
        pytest.skip("a checkpoint's pages are private and writable")
    base = np.arange(6.0)
    base.flags.writeable = False
    source = make(base)
    result = dlx.convert(source, to="torch")
    assert result.tolist() == base.tolist() and result.data_ptr() != out(source).ctypes.data
    with pytest.raises(errors.ConversionError):
        dlx.convert(source, to="torch", copy=False)


@pytest.mark.parametrize("select", [slice(0, 0), slice(None, None, 2), slice(1, 4)], ids=["empty", "gaps", "slice"])
def test_parts(make, select):
    """Empty, strided and inner slices convert."""
    base = np.arange(6.0)[select]
    result = out(make(base))
    assert result.tolist() == base.tolist() and result.dtype == base.dtype and result.shape == base.shape


@pytest.mark.parametrize("name", ARRAYS)
def test_other_dimensions(name, tmp_path):
    """No, two, and two transposed dimensions convert; columns have one."""
    for base in (np.array(7.0), np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3).T):
        result = out(ARRAYS[name](base, tmp_path))
        assert np.asarray(result).tolist() == base.tolist() and result.shape == base.shape
