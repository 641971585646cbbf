"""dlx's headers together with other DLPack headers: in any order, in C and C++, older and newer ones."""

import importlib.util
import itertools
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import dlx
from dlx._core import headers

WHEELS = {
    "tvm_ffi": ("include", "dlpack/dlpack.h"),
    "torch": ("include", "ATen/dlpack.h"),
    "pyarrow": ("include", "arrow/c/dlpack_abi.h"),
    "cuda.core": ("_include", "dlpack.h"),
}
COMPILERS = {"c": ("cc", "-std=c11"), "cpp": ("c++", "-std=c++17")}
OURS = ["dlpack_abi.h", "dlx.h", "dlx_cuda.h"]

# The declarations of dlpack.h 1.3, used in both languages; each wheel's header is a reference.
USE_13 = r"""
#if DLPACK_MAJOR_VERSION != 1 || DLPACK_MINOR_VERSION != 3
#error "another version"
#endif
#if DLPACK_FLAG_BITMASK_READ_ONLY != 1 || DLPACK_FLAG_BITMASK_IS_COPIED != 2
#error "other flags"
#endif
#if DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED != 4
#error "another flag"
#endif
DLPACK_EXTERN_C DLPACK_DLL int exported(DLManagedTensor* tensor, size_t n);
static DLDeviceType kind_of(DLDevice device) { return device.device_type; }
static int current(DLDeviceType type, int32_t id, void** out) {
  DLDevice device = {type, id};
  *out = NULL;
  switch (kind_of(device)) {
    case kDLCPU: return 0;
    case kDLTrn: return -1;
    default: return (int)kDLFloat4_e2m1fn;
  }
}
static int allocate(DLTensor* like, DLManagedTensorVersioned** out, void* context,
                    void (*SetError)(void*, const char*, const char*)) {
  DLDataTypeCode code = (DLDataTypeCode)like->dtype.code;
  if (code == kDLOpaqueHandle) SetError(context, "BufferError", "a handle");
  *out = NULL;
  return -1;
}
static int give(void* object, DLManagedTensorVersioned** out) { return object ? -1 : (*out = NULL, 0); }
static int take(DLManagedTensorVersioned* tensor, void** out) { return tensor ? -1 : (*out = NULL, 0); }
static int borrow(void* object, DLTensor* out) { return object ? -1 : (out->data = NULL, 0); }
DLPackExchangeAPI* made(void);
DLPackExchangeAPI* made(void) {
  static DLPackExchangeAPI table;
  DLPackVersion version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  DLPackExchangeAPIHeader* older = NULL;
  table.header.version = version;
  table.header.prev_api = older;
  table.managed_tensor_allocator = allocate;
  table.managed_tensor_from_py_object_no_sync = give;
  table.managed_tensor_to_py_object_no_sync = take;
  table.dltensor_from_py_object_no_sync = borrow;
  table.current_work_stream = current;
  return &table;
}
"""
USE_CPP = r"""
#include <type_traits>
static_assert(std::is_enum<DLDeviceType>::value, "");
static_assert(std::is_same<std::underlying_type<DLDeviceType>::type, int32_t>::value, "");
static_assert(std::is_same<decltype(DLDevice::device_type), DLDeviceType>::value, "");
static_assert(std::is_same<decltype(kDLInt), DLDataTypeCode>::value, "");
static_assert(std::is_same<decltype(DLTensor::shape), int64_t*>::value, "");
static_assert(std::is_same<decltype(DLPACK_FLAG_BITMASK_READ_ONLY), unsigned long>::value, "");
constexpr DLDevice second{DLDeviceType::kDLCUDA, 1};
constexpr auto number = static_cast<uint8_t>(DLDataTypeCode::kDLFloat8_e4m3fn);
template <DLDeviceType type> struct by_device { static constexpr int32_t value = type; };
static_assert(by_device<kDLMAIA>::value == 17, "");
"""
# dlx's additional declarations, with the header in any position.
USE_DLX = r"""
int rank(const DLManagedTensorVersioned* tensor);
int rank(const DLManagedTensorVersioned* tensor) {
  DLTensor like = tensor->dl_tensor;
  DLPackVersion version = {DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR};
  if (tensor->flags & DLPACK_FLAG_BITMASK_READ_ONLY) return (int)version.major;
  if (tensor->flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED) return -1;
  like.device.device_type = kDLCPU;
  return sizeof(DLPackExchangeAPI) > sizeof(DLManagedTensor) - sizeof like ? like.ndim + kDLFloat8_e4m3 : -1;
}
"""
USE_CORE = "int valid(const DLManagedTensorVersioned* t) { return dlx_validate(&t->dl_tensor, t->flags) == DLX_OK; }\n"


def folder(package, where):
    """Return the folder of an installed package without importing it, or None."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    return next((root / where for root in roots if (root / where).is_dir()), None)


def found():
    """Return {package: path} of each installed wheel's dlpack.h."""
    places = {package: (folder(package, where), header) for package, (where, header) in WHEELS.items()}
    paths = {package: root / header for package, (root, header) in places.items() if root}
    return {package: path for package, path in paths.items() if path.exists()}


THEIRS = found()


def refused(tmp_path, language, text, *options):
    """Compile a text; return the compiler's messages, or ""."""
    compiler, standard = COMPILERS[language]
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    source = tmp_path / f"probe.{language}"
    source.write_text(text)
    flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", f"-I{dlx.get_include()}", *options]
    # Unused functions and foreign system headers are not tested here.
    flags += ["-Wno-unused-function", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]
    done = subprocess.run([compiler, standard, *flags, str(source)], capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def including(*names):
    """Return the include lines of headers, by name or by path."""
    return "".join(f'#include "{name}"\n' for name in names)


def used(language):
    """Return the text that uses DLPack 1.3."""
    return USE_13 + (USE_CPP if language == "cpp" else "")


both_languages = pytest.mark.parametrize("language", COMPILERS)


@both_languages
@pytest.mark.parametrize("package", WHEELS)
def test_the_witness_is_right(package, language, tmp_path):
    """A wheel's header has everything of DLPack 1.3 that these tests use."""
    if package not in THEIRS:
        pytest.skip(f"no {package} wheel with a dlpack.h")
    assert refused(tmp_path, language, including(THEIRS[package]) + used(language)) == ""


@both_languages
@pytest.mark.parametrize("ours", OURS)
def test_ours_alone_is_a_whole_dlpack_h(ours, language, tmp_path):
    """Dlx's headers declare everything of dlpack.h 1.3, with the same names and types."""
    assert refused(tmp_path, language, including(ours, ours) + used(language) + USE_DLX) == ""


@both_languages
@pytest.mark.parametrize("package", WHEELS)
@pytest.mark.parametrize("ours", OURS)
def test_before_and_after_another_dlpack_h(ours, package, language, tmp_path):
    """Dlx's header and another one in one file, in both orders: DLPack 1.3 and dlx's functions are complete."""
    if package not in THEIRS:
        pytest.skip(f"no {package} wheel with a dlpack.h")
    rest = used(language) + USE_DLX + (USE_CORE if ours != "dlpack_abi.h" and language == "cpp" else "")
    for order in itertools.permutations([ours, THEIRS[package]]):
        assert refused(tmp_path, language, including(*order) + rest) == "", order


@pytest.mark.few(1)
@both_languages
def test_among_two_others(language, tmp_path):
    """Two other headers, and dlx's before, between and after them."""
    if len(THEIRS) < 2:
        pytest.skip("fewer than two wheels with a dlpack.h")
    for first, second in itertools.permutations(THEIRS.values(), 2):
        for place in range(3):
            order = [first, second]
            order.insert(place, "dlx.h")
            assert refused(tmp_path, language, including(*order) + used(language)) == "", order


# The C++ interfaces: (package, its include folder, header).
INTERFACES = [
    ("tvm_ffi", "include", "tvm/ffi/container/tensor.h"),
    ("pyarrow", "include", "arrow/c/dlpack.h"),
    ("nanobind", "include", "nanobind/ndarray.h"),
    ("torch", "include", "ATen/dlpack.h"),
]


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.slow
def test_with_cpp_interfaces(first, tmp_path):
    """The C++ headers of libraries that use DLPack compile with dlx's declarations, in both orders."""
    here = [(folder(package, where), header) for package, where, header in INTERFACES if folder(package, where)]
    if not here:
        pytest.skip("no library with a C++ interface")
    search = [part for path, _ in here for part in ("-isystem", str(path))]
    theirs = [header for _, header in here]
    order = ["dlx.h", *theirs] if first else [*theirs, "dlx.h"]
    search += ["-isystem", sysconfig.get_path("include")]
    assert refused(tmp_path, "cpp", including(*order) + USE_DLX, "-std=c++20", *search) == ""


# ---- every name


def names(text):
    """Return the macros, types and enumerators that a header declares."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    macros = re.findall(r"#\s*define (DLPACK_\w+)", text)
    types = re.findall(r"\}\s*(DL\w+)\s*;|\(\*(DL\w+)\)\s*\(|\b(?:enum|struct DL\w+) (DL\w+)", text)
    return {*macros, *itertools.chain(*types), *re.findall(r"\b(kDL\w+) = ", text)} - {""}


@pytest.mark.parametrize("package", WHEELS)
def test_no_name_is_missing(package):
    """Dlx's header has each macro, type and enumerator of a wheel's header."""
    if package not in THEIRS:
        pytest.skip(f"no {package} wheel with a dlpack.h")
    theirs = names(THEIRS[package].read_text(encoding="utf-8"))
    assert len(theirs) > 50
    assert theirs - names(Path(dlx.get_include(), "dlpack_abi.h").read_text(encoding="utf-8")) == set()


# ---- other versions


def another(version):
    """Return a short dlpack.h with the declarations of another version."""
    at_least = version.__ge__
    major, minor = version
    if at_least((1, 0)):
        say = f"#define DLPACK_MAJOR_VERSION {major}\n#define DLPACK_MINOR_VERSION {minor}"
    else:
        say = f"#define DLPACK_VERSION {minor}0" if at_least((0, 6)) else f"#define DLPACK_VERSION 0{minor}0"
    device = "DLDevice" if at_least((0, 4)) else "DLContext"
    codes = "kDLBfloat = 4U, kDLBool = 6U" + (", kDLFloat8_e4m3 = 8U" if at_least((1, 1)) else "")
    parts = [
        "#ifndef DLPACK_DLPACK_H_\n#define DLPACK_DLPACK_H_",
        say,
        "#include <stddef.h>\n#include <stdint.h>",
        "#ifdef __cplusplus\ntypedef enum : int32_t {\n#else\ntypedef enum {\n#endif",
        "kDLCPU = 1, kDLCUDA = 2" + (", kDLMAIA = 17, kDLTrn = 18" if at_least((1, 2)) else "") + "} DLDeviceType;",
        f"typedef struct {{ DLDeviceType device_type; int32_t device_id; }} {device};",
        f"typedef enum {{ kDLInt = 0U, {codes} }} DLDataTypeCode;",
        "typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;",
        f"typedef struct {{ void* data; {device} device; int32_t ndim; DLDataType dtype;",
        "int64_t* shape; int64_t* strides; uint64_t byte_offset; } DLTensor;",
        "typedef struct DLManagedTensor { DLTensor dl_tensor; void* manager_ctx;",
        "void (*deleter)(struct DLManagedTensor*); } DLManagedTensor;",
    ]
    if at_least((1, 0)):
        parts += [
            "#define DLPACK_FLAG_BITMASK_READ_ONLY (1UL << 0UL)",
            "typedef struct { uint32_t major; uint32_t minor; } DLPackVersion;",
            "struct DLManagedTensorVersioned { DLPackVersion version; void* manager_ctx;",
            "void (*deleter)(struct DLManagedTensorVersioned*); uint64_t flags; DLTensor dl_tensor; };",
        ]
    if at_least((1, 2)):
        parts += [
            "typedef struct DLManagedTensorVersioned DLManagedTensorVersioned;",
            "typedef struct DLPackExchangeAPIHeader { DLPackVersion version;",
            "struct DLPackExchangeAPIHeader* prev_api; } DLPackExchangeAPIHeader;",
            "typedef int (*DLPackCurrentWorkStream)(DLDeviceType, int32_t, void**);",
            "typedef struct DLPackExchangeAPI { DLPackExchangeAPIHeader header; void* four[4];",
            "DLPackCurrentWorkStream current_work_stream; } DLPackExchangeAPI;",
        ]
    return "\n".join([*parts, "#endif", ""])


@both_languages
@pytest.mark.parametrize("version", [(0, 5), (0, 6), (0, 8), (1, 0), (1, 1), (1, 2), (1, 4)], ids=str)
def test_after_another_version(version, language, tmp_path):
    """After an older dlpack.h, dlx declares the missing parts; after a newer one, nothing."""
    (tmp_path / "theirs.h").write_text(another(version))
    for text in (including("theirs.h", "dlx.h"), including("theirs.h", "dlpack_abi.h", "theirs.h")):
        assert refused(tmp_path, language, text + USE_DLX) == ""


@both_languages
@pytest.mark.parametrize("version", [(0, 3), (0, 8), (1, 0), (1, 3)], ids=str)
def test_before_an_older_version(version, language, tmp_path):
    """A dlpack.h after dlx's header is skipped by its guard, and DLPack 1.3 is complete."""
    (tmp_path / "theirs.h").write_text(another(version))
    assert refused(tmp_path, language, including("dlx.h", "theirs.h") + used(language) + USE_DLX) == ""


@pytest.mark.parametrize("version", [(0, 3), (0, 4), (2, 0)], ids=str)
def test_what_cannot_be_joined_says_so(version, tmp_path):
    """A header with another layout or other names is rejected with one sentence that says what to do."""
    (tmp_path / "theirs.h").write_text(another(version))
    said = refused(tmp_path, "c", including("theirs.h", "dlpack_abi.h"))
    assert "include dlpack_abi.h first" in said or "another major version" in said


# ---- what cffi reads


@pytest.mark.parametrize("name", OURS)
def test_cffi_reads_what_a_compiler_sees(name, tmp_path):
    """Cffi's text is the preprocessor's output for C, plus the integer macros, which cffi takes as constants."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    text = Path(dlx.get_include(), name).read_text(encoding="utf-8")
    probe = tmp_path / "probe.c"
    probe.write_text(re.sub(r"^#include.*$", "", text, flags=re.MULTILINE))
    seen = subprocess.run(["cc", "-E", "-P", str(probe)], capture_output=True, text=True, check=True).stdout
    given = headers.declarations(name)
    constants = re.findall(r"^#define (DLPACK_\w+) \d+(?:UL)?$", given, re.MULTILINE)
    given = re.sub(r"/\*.*?\*/|^#define DLPACK_[^\n]*", "", given, flags=re.DOTALL | re.MULTILINE)
    assert "#" not in given
    assert re.findall(r"\w+|\S", given) == re.findall(r"\w+|\S", seen)
    macros = {each for each in names(text) if each.startswith("DLPACK_")}
    assert {*constants} == macros - {"DLPACK_DLPACK_H_", "DLPACK_EXTERN_C", "DLPACK_DLL"}
