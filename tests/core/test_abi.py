"""dlx's ABI header agrees with foreign headers: sizes, offsets, enum values, flags, versions."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from dlx import errors
from dlx._core import types as abi
from dlx._core.native import ffi, lib

C_SRC = Path(__file__).resolve().parent.parent.parent / "c_src" / "include"
FOREIGN = {"tvm_ffi": "include/dlpack/dlpack.h", "torch": "include/ATen/dlpack.h"}
NAMES, TAGS, _ = ffi.list_types()
STRUCTS = [name for name in NAMES if name.startswith("DL") and ffi.typeof(name).kind == "struct"]
FIELDS = [(struct, field) for struct in STRUCTS for field, _ in ffi.typeof(struct).fields]
CODES = sorted(name for name in dir(lib) if name.startswith("kDL"))
FLAGS = sorted(name for name in dir(lib) if name.startswith("DLPACK_FLAG_"))


def header(package):
    """Return the path of the package's dlpack.h without importing the package, or skip."""
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin).parent / FOREIGN[package] if spec and spec.origin else None
    if path is None or not path.exists():
        pytest.skip(f"no {package} wheel with a dlpack.h")
    return path


def enums(text):
    """Return {name: value} of every enumerator in C text."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    bodies = re.findall(r"\benum\b[^{;]*\{([^}]*)\}", text)
    return {name: int(value) for body in bodies for name, value in re.findall(r"(\w+)\s*=\s*(\d+)U?", body)}


@pytest.fixture(scope="module", params=FOREIGN)
def foreign(request, tmp_path_factory):
    """Return {expression: value}, computed by a C program that is compiled with a foreign header."""
    path = header(request.param)
    wanted = [f"sizeof({struct})" for struct in STRUCTS]
    wanted += [f"offsetof({struct}, {field})" for struct, field in FIELDS]
    wanted += [f"sizeof((({struct}*)0)->{field})" for struct, field in FIELDS]
    wanted += [*CODES, *FLAGS, "DLPACK_MAJOR_VERSION", "DLPACK_MINOR_VERSION"]
    lines = [f'  printf("%s=%lld\\n", "{text}", (long long)({text}));' for text in wanted]
    folder = tmp_path_factory.mktemp("probe")
    source = folder / "probe.c"
    source.write_text(f'#include <stdio.h>\n#include "{path}"\nint main(void) {{\n' + "\n".join(lines) + "\n}\n")
    subprocess.run(["cc", "-std=c11", str(source), "-o", str(folder / "probe")], check=True)
    printed = subprocess.run([str(folder / "probe")], check=True, capture_output=True, text=True).stdout
    return {key: int(value) for key, value in (line.rsplit("=", 1) for line in printed.splitlines())}


@pytest.mark.parametrize("struct", STRUCTS)
def test_struct_sizes_agree(foreign, struct):
    """Every DLPack struct has the size of the foreign header's struct."""
    assert ffi.sizeof(struct) == foreign[f"sizeof({struct})"]


@pytest.mark.parametrize(("struct", "field"), FIELDS, ids=".".join)
def test_fields_agree(foreign, struct, field):
    """Every field has the offset and width of the foreign header's field."""
    assert ffi.offsetof(struct, field) == foreign[f"offsetof({struct}, {field})"]
    width = ffi.sizeof(dict(ffi.typeof(struct).fields)[field].type)
    assert width == foreign[f"sizeof((({struct}*)0)->{field})"]


@pytest.mark.parametrize("name", [*CODES, *FLAGS])
def test_constants_agree(foreign, name):
    """Every device code, dtype code and flag has the foreign header's value."""
    assert getattr(lib, name) == foreign[name]


def test_versions_agree(foreign):
    """Dlx exports the version of the header that it declares."""
    ours = lib.DLX_DLPACK_MAJOR, lib.DLX_DLPACK_MINOR
    assert ours == (foreign["DLPACK_MAJOR_VERSION"], foreign["DLPACK_MINOR_VERSION"])


@pytest.mark.parametrize("package", FOREIGN)
def test_enumerators_are_the_same_set(package):
    """Both headers have the same device and dtype codes."""
    theirs = enums(header(package).read_text())
    assert theirs == {name: getattr(lib, name) for name in CODES}
    assert len(theirs) > 30


@pytest.mark.parametrize("package", FOREIGN)
def test_flags_are_the_same_set(package):
    """Both headers have the same flags."""
    assert sorted(set(re.findall(r"#define (DLPACK_FLAG_\w+)", header(package).read_text()))) == FLAGS


@pytest.mark.parametrize("package", FOREIGN)
def test_structs_are_the_same_set(package):
    """Both headers define the same structs."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header(package).read_text(), flags=re.DOTALL)
    assert sorted(re.findall(r"typedef struct\b[^{;]*\{[^}]*\}\s*(\w+);", text)) == sorted(STRUCTS)


OPAQUE = {"dlx_ready"}  # used by pointer only


@pytest.mark.parametrize("name", [n for n in [*NAMES, *(f"struct {t}" for t in TAGS)] if n.split()[-1] not in OPAQUE])
def test_every_type_is_complete(name):
    """Cffi agrees with the compiler about every type of the cdef, otherwise access raises."""
    sizes = {"enum": 4, "primitive": 4, "pointer": ffi.sizeof("void*"), "function": ffi.sizeof("void*")}
    kind = ffi.typeof(name).kind
    assert ffi.sizeof(name) > 0 if kind == "struct" else ffi.sizeof(name) == sizes[kind]


def codes(text):
    """Return the kDL names of the enum whose first name is `text`."""
    body = next(b for b in re.findall(r"enum \{([^}]*)\}", (C_SRC / "dlpack_abi.h").read_text()) if text in b)
    return re.findall(r"\b(kDL\w+)", body)


@pytest.mark.parametrize("name", codes("kDLCPU"))
def test_every_device_has_a_name(name):
    """Every device code has a unique name that Device accepts."""
    device = abi.Device(getattr(lib, name), 3)
    assert not device.name.startswith("device_type_")
    assert device.name == name.removeprefix("kDL").lower() or "_" in device.name
    assert abi.Device(str(device)) == device == (getattr(lib, name), 3)


@pytest.mark.parametrize("name", [c for c in codes("kDLInt") if c != "kDLOpaqueHandle"])
def test_every_dtype_has_a_name(name):
    """Every dtype code has a name that DType accepts; opaque handles have no name."""
    bits = int((re.findall(r"Float(\d)", name) or [{"kDLBool": 8, "kDLBfloat": 16}.get(name, 32)])[0])
    dtype = abi.DType(getattr(lib, name), bits, 1)
    assert not dtype.name.startswith("code")
    assert abi.DType(dtype.name) == dtype
    assert abi.DType(f"{dtype.name}x4") == (dtype.code, bits, 4)


def test_a_devices_name_and_number_may_be_apart():
    """Device("cuda", 1) is cuda:1; two numbers or no arguments are rejected."""
    assert abi.Device("cuda", 1) == abi.Device("cuda:1") == (2, 1)
    for wrong in (("cuda:0", 1), ("cuda", -1), ("cuda", "1"), ("gpu", 1)):
        with pytest.raises(errors.DeviceError):
            abi.Device(*wrong)


def test_unknown_numbers_are_kept():
    """A device or dtype that DLPack 1.3 does not define is kept unchanged."""
    assert abi.Device(20, 1).type == 20
    assert abi.DType(200, 8, 1).code == 200


@pytest.mark.parametrize("name", ["float33", "float8", "float24", "complex16", "uint24", "int0", "int08", "float33x2"])
def test_names_that_nobody_has_are_refused(name):
    """A kind has a name for its usual widths only; other widths are named by their code."""
    with pytest.raises(errors.DTypeError, match=f"unknown dtype '{name}'"):
        abi.DType(name)
    odd = abi.DType(abi.DType("float32").code, 33, 2)
    assert odd.name == "code2_33bitx2" and abi.DType(odd.name) == odd
    assert repr(odd) == "DType(2, 33, 2)"


def test_every_dtype_is_listed_once():
    """`DType.all` lists each named dtype once; each name creates the same dtype."""
    listed = abi.DType.all()
    assert len({*listed}) == len(listed) == 34 and all(type(each) is abi.DType for each in listed)
    assert all(abi.DType(each.name) == each for each in listed)
    assert {each.code for each in listed} == {0, 1, 2, *range(4, 18)}  # all except opaque handles
    assert {each.name for each in listed if each.lanes != 1} == {"float4_e2m1fnx2"}
