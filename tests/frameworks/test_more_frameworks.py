"""tensorflow, paddle, mlx, warp, onnxruntime and modules with from_dlpack: values, sharing, read-only, refusals.

`nox -s frameworks` runs this file in an environment for each of them; `make test` skips missing frameworks.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass

import pytest

import dlx
from dlx import errors
from dlx._core import native
from dlx._engine import fast_path
from dlx._registry import array_like
from dlx._registry.registry import registry

np = pytest.importorskip("numpy")

INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Framework:
    """The features of a framework; it reports the address of its arrays if it can."""

    name: str
    module: str
    own: str  # code of an array of float32 [[0, 1, 2], [3, 4, 5]]; m is the module
    address: str = ""  # code of the address of x; empty: numpy reads the export
    dtypes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    shares: frozenset[str] = frozenset({"compact"})  # layouts that it shares
    copies: bool = False  # always
    keeps_readonly: bool = False
    gives_readonly: bool = False
    ndims: tuple[int, int] = (0, 8)


LAYOUTS = {
    "compact": lambda a: a,
    "transposed": lambda a: a.T,
    "gaps": lambda a: a[:, ::2],
    "backwards": lambda a: a[::-1],
    "repeated": lambda a: np.lib.stride_tricks.as_strided(a, (2, 3), (0, 4)),
}
STRIDED = frozenset({"compact", "transposed", "gaps", "repeated"})
FLOATS = ("float16", "float32", "float64")
FRAMEWORKS = (
    Framework(
        "mlx", "mlx.core", "m.arange(6, dtype=m.float32).reshape(2, 3)",
        dtypes=("bool", *INTS, "float16", "float32", "complex64", "bfloat16"),
        refused=("float64", "complex128", "float8_e5m2"), copies=True,
    ),
    Framework(
        "onnxruntime", "onnxruntime", "m.OrtValue.ortvalue_from_numpy(np.arange(6, dtype='f4').reshape(2, 3))",
        address="x.data_ptr()", dtypes=("bool", *INTS, *FLOATS, *NARROW), refused=("complex64", "complex128"),
    ),
    Framework(
        "warp", "warp", "m.array(np.arange(6, dtype='f4').reshape(2, 3), device='cpu')",
        address="x.ptr", dtypes=("bool", *INTS, *FLOATS, "bfloat16"), refused=("complex64", "float8_e5m2"),
        shares=STRIDED | {"backwards"}, ndims=(1, 4),
    ),
    Framework(
        "paddle", "paddle", "m.arange(6, dtype='float32').reshape([2, 3])",
        address="x.data_ptr()", dtypes=("bool", *INTS, *FLOATS, "complex64", "complex128", *NARROW),
        refused=("float8_e8m0fnu",), shares=STRIDED, ndims=(0, 9),
    ),
    Framework(
        "tensorflow", "tensorflow", "m.reshape(m.range(6, dtype=m.float32), [2, 3])",
        dtypes=("bool", *INTS, *FLOATS, "complex64", "complex128", "bfloat16"), refused=("float8_e5m2",),
        gives_readonly=True, keeps_readonly=True,
    ),
    Framework(
        "array_api_strict", "array_api_strict", "m.reshape(m.arange(6, dtype=m.float32), (2, 3))",
        address="x._array.ctypes.data", dtypes=("bool", *INTS, "float32", "float64", "complex64", "complex128"),
        refused=("float16", "bfloat16"), shares=STRIDED, keeps_readonly=True,
    ),
)  # fmt: skip


@pytest.fixture(params=FRAMEWORKS, ids=lambda framework: framework.name)
def framework(request):
    """Return an installed framework, or skip."""
    imported(request.param.module)
    return request.param


def imported(name):
    """Import a framework; some print messages on import."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


def own(framework):
    """Return an array created by the framework."""
    module = importlib.import_module(framework.module)
    if hasattr(module, "init"):
        module.init()
    return eval(framework.own, {"m": module, "np": np})


def address(framework, x):
    """Return the address of an array's first element."""
    if framework.address:
        return eval(framework.address, {"x": x})
    return np.from_dlpack(x).ctypes.data


def aligned(shape=(2, 3), dtype="float32"):
    """Return an array of 0, 1, 2, ... aligned to 64 bytes."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    memory = np.zeros(count * dtype.itemsize + 64, "uint8")
    start = -memory.ctypes.data % 64
    made = memory[start : start + count * dtype.itemsize].view(dtype).reshape(shape)
    made[...] = np.arange(count).reshape(shape) % 2 if dtype.kind == "b" else np.arange(count).reshape(shape)
    return made


def dtyped(name, shape=(2, 3)):
    """Return an array of a dtype of numpy, or of ml_dtypes."""
    if hasattr(np, name if name != "bool" else "bool_"):
        return aligned(shape, name)
    return aligned(shape, getattr(pytest.importorskip("ml_dtypes"), name))


# ---- by value and by address -----------------------------------------------------------------------------------------


def test_every_dtype_comes_back_bit_by_bit(framework):
    """Every dtype that the framework exports survives, bool as bool, also in the framework's copy."""
    for name in framework.dtypes:
        source = dtyped(name)
        inside = dlx.convert(source, to=framework.name)
        assert dlx.describe(inside).dtype == dlx.DType(name), name
        for array in (inside, dlx.convert(inside, to=framework.name, copy=True)):
            back = dlx.convert(array, to="numpy")
            assert back.dtype == source.dtype and back.tobytes() == source.tobytes(), name


def test_other_dtypes_are_refused(framework):
    """Other dtypes are refused, never narrowed or renamed."""
    for name in framework.refused:
        with pytest.raises(errors.DTypeError) as caught:
            dlx.convert(dtyped(name), to=framework.name)
        assert caught.value.fix and name in str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_come_in_as_the_plan_says(framework, layout):
    """Memory is shared or copied like the plan says; copy=False raises for copies; copy=True copies."""
    source = LAYOUTS[layout](aligned((4, 4))[:2, :3] if layout == "gaps" else aligned())
    shares = layout in framework.shares and not framework.copies
    plan = dlx.plan(source, to=framework.name)
    inside = dlx.convert(source, to=framework.name)
    assert plan.outcome == ("shared" if shares else "copied"), plan
    assert (address(framework, inside) == source.ctypes.data) == shares
    assert dlx.convert(inside, to="numpy").tolist() == source.tolist()
    del inside  # paddle leaks memory that it imports twice at the same time
    if shares:
        assert address(framework, dlx.convert(source, to=framework.name, copy=False)) == source.ctypes.data
    else:
        with pytest.raises(errors.CopyRequiredError):
            dlx.convert(source, to=framework.name, copy=False)
    copied = dlx.convert(source, to=framework.name, copy=True)
    assert address(framework, copied) != source.ctypes.data
    assert dlx.convert(copied, to="numpy").tolist() == source.tolist()


def test_what_leaves_is_shared(framework):
    """An array of the framework is shared, read-only if its arrays are constant."""
    array = own(framework)
    assert dlx.describe(array).dtype == dlx.DType("float32") and dlx.describe(array).shape == (2, 3)
    result = dlx.convert(array, to="numpy", copy=False)
    assert result.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert result.ctypes.data == address(framework, array)
    assert result.flags.writeable is not framework.gives_readonly
    assert dlx.describe(array).readonly is framework.gives_readonly


def test_memory_lives_as_long_as_a_result(framework):
    """The result keeps the memory alive, in both directions, for any owner."""
    array = own(framework)
    result = dlx.convert(array, to="numpy")
    del array
    source = aligned((1000,))
    inside = dlx.convert(source, to=framework.name)
    del source
    gc.collect()
    junk = [np.full(1000, -1.0, "float32") for _ in range(50)]
    assert result.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert dlx.convert(inside, to="numpy").tolist() == list(range(1000))
    del junk


def test_read_only_memory_is_never_written(framework):
    """Read-only memory stays read-only, is copied, or is refused at the caller's request."""
    source = aligned()
    source.flags.writeable = False
    inside = dlx.convert(source, to=framework.name)
    shares = framework.keeps_readonly and not framework.copies
    assert (address(framework, inside) == source.ctypes.data) == shares
    if not shares:
        with pytest.raises(errors.ConversionError):
            dlx.convert(source, to=framework.name, copy=False)


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0), (1, 1), (1,) * 5, (1,) * 10], ids=str)
def test_shapes(framework, shape):
    """0-d, empty and high-dimensional arrays convert, or are refused by name."""
    source = aligned(shape)
    low, high = framework.ndims
    if len(shape) < low or (len(shape) > high and framework.name in ("warp", "paddle")):
        with pytest.raises(errors.LayoutError, match=f"{len(shape)} dimensions"):
            dlx.convert(source, to=framework.name)
        return
    inside = dlx.convert(source, to=framework.name)
    back = dlx.convert(inside, to="numpy")
    assert back.shape == shape and back.tobytes() == source.tobytes()
    if 0 in shape:
        dlx.convert(source, to=framework.name, copy=False)


def test_empty_arrays_that_live_together_leave_nothing(framework):
    """Paddle's import never releases the second array, nor its base."""
    module = [dlx.convert(aligned((0, 3)), to=framework.name) for _ in range(3)]
    del module
    gc.collect()
    before = native.live()
    again = [dlx.convert(aligned((0, 3)), to=framework.name) for _ in range(3)]
    del again
    gc.collect()
    assert native.live() == before


def test_an_array_of_the_framework_stays_what_it_is(framework):
    """The framework's arrays are unchanged, by name, by module, and in containers; copy=True copies them."""
    array = own(framework)
    assert dlx.convert(array, to=framework.name) is array
    assert dlx.convert(array, to=sys.modules[framework.module]) is array
    assert dlx.convert([array], to=framework.name)[0] is array
    copied = dlx.convert(array, to=framework.name, copy=True)
    assert address(framework, copied) != address(framework, array)
    assert type(copied) is type(array)


def test_memory_on_a_gpu_is_where_the_array_says(framework, monkeypatch):
    """Arrays that report a GPU are moved by the plan, warp's with warp's functions."""
    if framework.name in ("mlx", "array_api_strict"):
        pytest.skip("its arrays have no device, or are on the host only")
    x = own(framework)
    assert dlx.plan(x, framework.name, device="cpu").outcome == "same"
    assert dlx.convert(x, framework.name, device="cpu") is x
    monkeypatch.setattr(type(x), "__dlpack_device__", lambda self: (2, 1), raising=True)
    assert dlx.plan(x, framework.name).outcome == "same"
    assert dlx.plan(x, framework.name, device="cuda:1").outcome == "same"
    assert isinstance(dlx.plan(x, framework.name, device="cuda:0").error, errors.DeviceError)
    plan = dlx.plan(x, framework.name, device="cpu")
    if framework.name == "warp":
        assert plan.outcome == "copied"
        assert [step.do for step in plan.steps] == ["move"]
        with pytest.raises(errors.CopyRequiredError, match="cuda:1"):
            dlx.convert.__wrapped__(x, framework.name, device="cpu", copy=False)
        assert type(dlx.convert.__wrapped__(x, framework.name, device="cpu")) is type(x)
    else:  # dlx would move it, but has no driver
        assert isinstance(plan.error, errors.DeviceError)
        assert "cuda:1" in str(plan.error)


def test_variables_of_tensorflow_are_where_they_say(monkeypatch):
    """Variables have no __dlpack_device__; their device is known without reading the value."""
    tf = imported("tensorflow")
    variable = tf.Variable([1.0, 2.0])
    assert dlx.convert(variable, "tensorflow", device="cpu") is variable
    monkeypatch.setattr(type(variable), "device", "/job:localhost/replica:0/task:0/device:GPU:1")
    assert dlx.plan(variable, "tensorflow", device="cuda:1").outcome == "same"
    assert isinstance(dlx.plan(variable, "tensorflow", device="cuda:0").error, errors.DeviceError)


def test_it_takes_the_fast_path_both_ways(framework):
    """The Python path is not called, in either direction or in a container."""

    def python_path(*args, **options):
        raise AssertionError(f"the Python path was called for {args} {options}")

    convert = native.FastPathFunction(python_path, fast_path.learn, None)
    source, array = aligned(), own(framework)
    dlx.convert(source, to=framework.name)  # imports and initializes
    assert dlx.convert(convert(source, to=framework.name), to="numpy").tolist() == source.tolist()
    inside = convert([source, {"a": source}], to=framework.name)
    assert type(inside[0]) is type(array) and inside[1]["a"] is inside[0]
    if framework.name == "array_api_strict":  # known by its from_dlpack only
        return
    result = convert(array, to="numpy")
    assert result.ctypes.data == address(framework, array)
    assert result.flags.writeable is not framework.gives_readonly
    assert convert(array, to="dlx").readonly is framework.gives_readonly


def test_the_host_has_every_number(framework):
    """A number of the host names the framework's one host device, and the adapter keeps its contract."""
    assert (
        dlx.convert(dlx.convert(aligned(), to=framework.name, device="cpu:1"), to="numpy").tolist()
        == aligned().tolist()
    )
    devices = registry.target(framework.name).adapter.devices
    assert devices.from_native(devices.to_native(dlx.Device("cpu"))) == dlx.Device("cpu")


def test_it_is_an_example_for_like(framework):
    """An array of the framework is an example for `like=`."""
    array = dlx.convert(aligned(), to=framework.name)
    assert type(dlx.convert(np.ones(3, "float32"), like=array)) is type(array)


def test_trees_and_decorated_functions(framework):
    """Lists, and functions decorated with `using`, work."""
    results = dlx.convert([aligned(), {"a": aligned((2,))}], to=framework.name)
    assert dlx.convert(results, to="numpy")[1]["a"].tolist() == [0, 1]

    @dlx.using(framework.name)
    def same(x):
        return x

    assert same(aligned()).tolist() == [[0, 1, 2], [3, 4, 5]]


# ---- one by one ------------------------------------------------------------------------------------------------------


def child(code):
    """Run code in a new process, which must succeed; return its output."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-2000:])
    return done.stdout


REFUSING = """
import dlx, numpy as np, {imports}
def refused(x, **options):
    try:
        print("CONVERTED", dlx.convert(x, to="numpy", **options))
    except dlx.errors.DlxError as error:
        print(type(error).__name__)
"""


HOSTILE = """
import gc, importlib, dlx, numpy as np
from dlx.testing import Source
importlib.import_module({module!r})
for name, options in {{
    "misaligned": {{"shift": 1}}, "backwards": {{"strides": (-6, 1)}}, "offset": {{"byte_offset": 8}},
    "null": {{"data": 0}}, "negative-extent": {{"claims": (-4, 6)}}, "overflow": {{"claims": (2**62, 16)}},
    "version-2": {{"version": (2, 0), "legacy": False}}, "no-deleter": {{"deleter": False}},
}}.items():
    source = Source("float32", **{{"shape": (4, 6)}} | options)
    try:
        result = dlx.convert(dlx.convert(source, to={name!r}), to="numpy")
    except dlx.errors.DlxError as error:
        print(name, type(error).__name__)
    else:
        print(name, "right" if result.tobytes() == source.elements() else "WRONG")
        del result
    gc.collect()
print("alive", dlx._core.native.live())
"""


def test_hostile_producers_are_refused_or_come_in_right(framework):
    """Hostile producers, in a new process that they could kill, are refused without a leak, or read correctly."""
    said = child(HOSTILE.format(module=framework.module, name=framework.name))
    for name in ("null", "negative-extent", "overflow", "version-2"):
        assert re.search(rf"^{name} \w+Error$", said, re.MULTILINE), said
    for name in ("misaligned", "backwards", "offset", "no-deleter"):
        assert f"{name} right" in said, said
    assert said.endswith("\nalive 0\n"), said


def test_tensorflow_gives_no_memory_of_what_has_none():
    """Strings (whose export ends the process), variants, symbolic, sparse and ragged tensors, float8 are refused."""
    pytest.importorskip("tensorflow")
    said = child(
        REFUSING.format(imports="tensorflow as tf")
        + """
refused(tf.constant(["a"]))
refused(tf.cast(tf.ones([3]), tf.dtypes.experimental.float8_e5m2))
refused(tf.sparse.eye(2))
refused(tf.ragged.constant([[1], [2, 3]]))
refused(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])))
refused(tf.Variable(["a"]))
@tf.function
def traced(x):
    refused(x)
    return x
traced(tf.ones(3))
variable = tf.Variable([1.0, 2.0])
value = dlx.convert(variable, to="numpy")
print(value.tolist(), value.flags.writeable)
odd = np.zeros(65, "uint8")[1:].view("float32")
print((dlx.convert(odd, to="tensorflow") + 1).numpy().sum())
"""
    ).split("\n")
    assert said[:7] == ["DTypeError"] * 2 + ["LayoutError"] * 3 + ["DTypeError", "LayoutError"]
    assert said[7:9] == ["[1.0, 2.0] False", "16.0"]


def test_paddle_gives_no_gradient_out():
    """Gradients, sparse tensors and freed memory are refused, also through the exchange table, which does not check."""
    paddle = imported("paddle")
    graph = paddle.ones([3])
    graph.stop_gradient = False
    for tensor in (graph, paddle.create_parameter([3], "float32")):
        with pytest.raises(errors.ConversionError, match="detach=True") as caught:
            dlx.convert(tensor, to="numpy")
        assert caught.type is errors.ConversionError  # as for torch: no copy would help
        assert dlx.convert(tensor, to="numpy", detach=True).ctypes.data == tensor.data_ptr()
        assert dlx.convert(tensor, to="paddle") is tensor
        assert dlx.convert(tensor, to="paddle", detach=True).stop_gradient
        with pytest.raises(errors.ConversionError, match="gradients would be lost") as caught:
            dlx.using("numpy")(np.sin)(tensor)
        assert caught.value.fix == "Use dlx.using(..., detach=True) to drop them."
    said = child(
        REFUSING.format(imports="paddle")
        + """
refused(paddle.sparse.sparse_coo_tensor([[0], [1]], [1.0], [2, 2]))
gone = paddle.ones([10])
gone.get_tensor()._clear()
refused(gone)
"""
    ).split()
    assert said[0] == "LayoutError" and len(said) == 2 and "CONVERTED" not in said
    sparse = paddle.sparse.sparse_coo_tensor([[0], [1]], [1.0], [2, 2])
    for options in ({"to": "numpy"}, {"to": "paddle", "copy": True}):
        with pytest.raises(errors.LayoutError, match="sparse") as caught:
            dlx.convert(sparse, **options)
        assert caught.value.fix == "Call .to_dense() first."
        assert str(dlx.plan(sparse, **options).error) == str(caught.value)
    assert dlx.convert(sparse, to="paddle") is sparse


def test_paddle_leaks_what_it_imports_twice_at_a_time():
    """Paddle leaks; if a version does not, remove the known issue."""
    paddle, source = imported("paddle"), aligned()
    before = sys.getrefcount(source)
    both = [paddle.from_dlpack(source), paddle.from_dlpack(source)]
    del both
    gc.collect()
    assert sys.getrefcount(source) > before


@pytest.mark.parametrize(("kind", "steps"), [("float32", 6), ("float32", 2), ("vec2h", 5)])
def test_warp_strides_that_are_no_whole_elements(kind, steps):
    """Strides that are not whole elements are refused; warp's export rounds them down."""
    wp = imported("warp")
    memory = np.arange(24, dtype="u1")

    def array(count):
        return wp.array(
            ptr=memory.ctypes.data, dtype=getattr(wp, kind), shape=(count,), strides=(steps,), device="cpu", copy=False
        )

    for copy in (None, True):
        assert dlx.plan(array(3), to="numpy", copy=copy).outcome == "refused"
        with pytest.raises(errors.LayoutError, match="not multiples of the element size") as caught:
            dlx.convert(array(3), to="numpy", copy=copy)
        assert caught.value.fix == "Call .contiguous() first."
    contiguous = array(3).contiguous()
    assert np.array_equal(dlx.convert(contiguous, to="numpy"), contiguous.numpy(), equal_nan=True)
    assert dlx.convert(array(1), to="numpy").ctypes.data == memory.ctypes.data


def test_warp_is_initialized_and_says_what_cannot_cross():
    """In a new process wp.init() is called; gradients, structures and vectors are refused or converted."""
    pytest.importorskip("warp")
    said = child(
        REFUSING.format(imports="warp as wp")
        + """
wp.config.quiet = True
print(dlx.convert(np.ones((2, 3)), to="warp").shape)
graph = wp.zeros(3, dtype=float, requires_grad=True, device="cpu")
refused(graph)
print(dlx.convert(graph, to="numpy", detach=True).ctypes.data == graph.ptr)
print(dlx.convert(graph, to="warp") is graph, dlx.convert(graph, to="warp", detach=True).requires_grad)
@wp.struct
class Pair:
    a: float
    b: int
refused(wp.zeros(3, dtype=Pair, device="cpu"))
print(dlx.convert(wp.zeros(3, dtype=wp.vec3, device="cpu"), to="numpy").shape)
"""
    )
    lines = said.splitlines()
    lines = lines[lines.index("(2, 3)") :]  # after warp's messages about the machine
    assert lines[0] == "(2, 3)" and lines[1] == "ConversionError", lines
    assert lines[2:4] == ["True", "True False"] and lines[4].endswith("Error") and lines[5] == "(3, 3)"


def test_onnxruntime_keeps_what_its_capsules_do_not():
    """The numpy memory behind a value stays alive; other values than dense tensors are refused."""
    ort = imported("onnxruntime")
    source = np.arange(1000.0)
    value = ort.OrtValue.ortvalue_from_numpy(source)
    result = dlx.convert(value, to="numpy")
    assert result.ctypes.data == source.ctypes.data
    before = sys.getrefcount(source)
    del value
    assert sys.getrefcount(source) == before
    del result
    gc.collect()
    assert sys.getrefcount(source) < before
    sparse = ort.SparseTensor.sparse_coo_from_numpy(
        np.array([2, 2]), np.ones(1, "float32"), np.zeros(1, "int64"), ort.OrtDevice.make("cpu", 0)
    )
    with pytest.raises(errors.DTypeError, match="sparse"):
        dlx.convert(ort.OrtValue.ort_value_from_sparse_tensor(sparse), to="numpy")


def test_mlx_gives_out_what_it_computes_then():
    """A lazy array is computed; inside compile and vmap there are no values."""
    mx = imported("mlx.core")
    assert dlx.convert(mx.ones(4) + 1, to="numpy").tolist() == [2.0] * 4
    seen = []

    @mx.compile
    def traced(x):
        with pytest.raises(errors.ConversionError) as caught:
            dlx.convert(x, to="numpy")
        seen.append(caught.value.__cause__)
        return x

    traced(mx.ones(4))
    assert len(seen) == 1 and seen[0] is not None


@pytest.mark.parametrize("name", ["paddle", "tensorflow"])
def test_arrays_without_elements_have_every_dtype(name):
    """Empty arrays of every dtype convert, also read-only ones."""
    imported(name)
    target = registry.target(name)
    for dtype in sorted(target.capabilities.dtypes):
        native_dtype = target.adapter.dtypes.to_native(dlx.DType(dtype))
        for shape in ((0,), (4, 0), (0, 3, 2)):
            tensor = dlx.empty(shape, dtype)
            for source in (tensor, native.tensor_view(tensor, None, None, tensor.flags | 1, None)):
                result = dlx.convert(source, to=name)
                assert tuple(result.shape) == shape and result.dtype == native_dtype
                back = dlx.convert(result, to="dlx")
                assert back.dtype.name == dtype and back.shape == shape


@pytest.mark.parametrize("attribute", ["indexedarray", "fabricarray", "TensorArray"])
def test_what_is_scattered_in_memory_has_a_hint(attribute):
    """An array in several pieces is refused, with the call that joins it."""
    kind = getattr(imported("tensorflow" if attribute == "TensorArray" else "warp"), attribute)
    fix = "Call .stack() first." if attribute == "TensorArray" else "Call .contiguous() first."
    assert array_like.refusal(kind).fix == fix


@pytest.mark.parametrize("name", ["mlx", "onnxruntime", "warp", "paddle", "tensorflow", "xarray"])
def test_an_absent_framework_is_a_clear_error(name, python):
    """The error has the install command; the adapter is listed without importing the framework."""
    said = python(
        f"""
        import sys
        sys.modules[{name!r}] = None
        import dlx
        assert {name!r} in dlx.adapters()
        try:
            dlx.convert(b"abc", to={name!r})
        except dlx.errors.DlxError as error:
            print(type(error).__name__, error.fix)
        """
    )
    assert said.startswith("FrameworkNotInstalledError Install it: pip install"), said


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("tensorflow", "float64"), ("mlx", "float32")])
def test_functions_are_differentiated_for_others(name, dtype):
    """Reverse mode works, also twice; an unused result has no effect."""
    m = pytest.importorskip("mlx.core" if name == "mlx" else name)
    vjp = registry.target(name).adapter.gradients.vjp
    into, out = (lambda x: dlx.convert(x, to=name)), (lambda x: np.asarray(dlx.convert(x, to="numpy")))
    x, y, given = (np.random.default_rng(0).normal(size=shape).astype(dtype) for shape in ((3, 2), (2, 2), (3, 2)))

    def function(x, y):
        return [m.matmul(m.sin(x), y), x * 1]

    def derivative(x, y):
        return vjp(function, [x, y])[1]([into(given), None])

    of_x, of_y = map(out, derivative(into(x), into(y)))
    assert np.allclose(of_x, np.cos(x) * (given @ y.T), atol=1e-5)
    assert np.allclose(of_y, np.sin(x).T @ given, atol=1e-5)
    second = vjp(derivative, [into(x), into(y)])[1]([into(np.ones_like(x)), None])
    assert np.allclose(out(second[0]), -np.sin(x) * (given @ y.T), atol=1e-5)


def test_complex_gradients_of_tensorflow():
    """Complex gradients follow the convention of `GradSupport`."""
    pytest.importorskip("tensorflow")
    random = np.random.default_rng(0)
    z, given = (random.normal(size=3) + 1j * random.normal(size=3) for _ in range(2))
    vjp = registry.target("tensorflow").adapter.gradients.vjp
    _, pullback = vjp(lambda z: [z * z * (2 + 1j)], [dlx.convert(z, to="tensorflow")])
    (found,) = pullback([dlx.convert(given, to="tensorflow")])
    assert np.allclose(dlx.convert(found, to="numpy"), np.conj(2 * z * (2 + 1j)) * given)


def test_tapes_of_tensorflow_are_not_cut():
    """A tensor that a tape watches is refused without detach=True; other tensors convert."""
    tf = pytest.importorskip("tensorflow")
    double = dlx.using("numpy")(lambda x: x * 2)
    x, variable = tf.constant([1.0, 2.0]), tf.Variable([1.0, 2.0])
    assert double(x).numpy().tolist() == [2, 4]
    with tf.GradientTape() as tape:
        assert double(x).numpy().tolist() == [2, 4]
        tape.watch(x)
        for each in (x, x * 1, variable, variable * 1):
            with pytest.raises(dlx.errors.ConversionError, match=r"detach=True"):
                double(each)
        assert dlx.using("numpy", detach=True)(lambda x: x * 2)(x).numpy().tolist() == [2, 4]
        with tape.stop_recording():
            assert double(x).numpy().tolist() == [2, 4]


def test_onnxruntime_values_that_are_no_tensors_are_described():
    """Values that are not tensors are described without a device."""
    ort = imported("onnxruntime")
    values, indices = np.array([1.0], "f4"), np.array([1])
    sparse = ort.SparseTensor.sparse_coo_from_numpy(np.array([3, 3]), values, indices, ort.OrtDevice.make("cpu", 0))
    value = ort.OrtValue.ort_value_from_sparse_tensor(sparse)
    assert dlx.describe(value).framework == "onnxruntime"
    assert dlx.convert(value, "onnxruntime", device="cpu") is value
    with pytest.raises(errors.DTypeError, match="not a tensor of numbers"):
        dlx.convert(value, "numpy")


DEVICES = {
    "paddle": ("m.ones([1]).place", "m.CPUPlace()"),
    "mlx.core": ("m.default_device()", "m.cpu"),
    "warp": ("m.zeros(1, device='cpu').device",),
    "tensorflow": ("m.ones(1).device", "m.config.list_logical_devices('CPU')[0].name"),
    "array_api_strict": ("m.ones(1).device", "m.Device('device1')"),
    "torch": ("m.ones(1).device",),
    "jax": ("m.numpy.ones(1).device", "m.devices('cpu')[0]", "m.numpy.ones(1).sharding"),
    "tvm_ffi": ("m.device('cpu', 0)",),
    "numpy": ("m.ones(1).device",),
}


@pytest.mark.parametrize("name", DEVICES)
def test_devices_of_a_framework_are_devices_of_every_verb(name, tmp_path):
    """`device=` accepts the framework's devices, even before dlx has seen the framework."""
    module = imported(name)
    file = tmp_path / "x.npy"
    np.save(file, np.ones(3))
    for code in DEVICES[name]:
        device = eval(code, {"m": module})
        assert dlx.Device(device) == dlx.Device("cpu")
        with dlx.share(np.ones(3)) as handle:
            made = (
                dlx.convert(np.ones(3), to="dlx", device=device),
                dlx.convert([np.ones(3)], to="dlx", device=device)[0],
                dlx.stack([np.ones(3)], "dlx", device=device),
                dlx.attach(handle, "dlx", device=device),
                dlx.open(file, "dlx", device=device)[""],
                dlx.using("dlx", device=device)(lambda x: x)(np.ones(3)),
                dlx.empty(3, "float32", device),
            )
        assert all(each.device == dlx.Device("cpu") for each in map(dlx.describe, made))
        assert dlx.plan(np.ones(3), to="dlx", device=device).device == dlx.Device("cpu")


@pytest.mark.parametrize("name", ["foo/bar", "/device:QPU:0", "3", "cpu:x"])
def test_other_names_are_no_devices(name):
    """Other texts are refused, even if a framework's devices are texts."""
    with pytest.raises(errors.DeviceError, match="unknown device"):
        dlx.convert(np.ones(3), to="dlx", device=name)
