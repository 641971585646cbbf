"""`dlx.ctypes` mirrors the structs of the header: same names, fields, sizes, offsets and kinds."""

import ctypes

import pytest

import dlx
from dlx._core.native import ffi

STRUCTS = [name for name in ffi.list_types()[0] if name.startswith("DL") and ffi.typeof(name).kind == "struct"]
FIELDS = [(struct, field) for struct in STRUCTS for field, _ in ffi.typeof(struct).fields]


def field_of(struct, name):
    """Return a field's ctypes type."""
    return dict(getattr(dlx.ctypes, struct)._fields_)[name]


def test_every_struct_is_mirrored():
    """The module has exactly the header's structs."""
    assert sorted(dlx.ctypes.__all__) == sorted(STRUCTS)
    assert len(STRUCTS) == 8


@pytest.mark.parametrize("struct", STRUCTS)
def test_struct_sizes_agree(struct):
    """Every struct has the size, alignment and order of fields of the compiled header."""
    mirror = getattr(dlx.ctypes, struct)
    assert ctypes.sizeof(mirror) == ffi.sizeof(struct)
    assert ctypes.alignment(mirror) == ffi.alignof(struct)
    assert [name for name, _ in mirror._fields_] == [name for name, _ in ffi.typeof(struct).fields]


@pytest.mark.parametrize(("struct", "field"), FIELDS, ids=".".join)
def test_fields_agree(struct, field):
    """Every field has the offset, width and signedness of the compiled header."""
    mirror = getattr(getattr(dlx.ctypes, struct), field)
    kind = dict(ffi.typeof(struct).fields)[field].type
    assert mirror.offset == ffi.offsetof(struct, field)
    assert mirror.size == ffi.sizeof(kind)
    if kind.kind == "primitive":
        assert (field_of(struct, field)(-1).value < 0) == kind.cname.startswith("int")
    elif kind.kind == "struct":
        assert field_of(struct, field).__name__ == kind.cname.removeprefix("struct ")
    elif kind.kind == "function":
        assert len(field_of(struct, field)._argtypes_) == len(kind.args)


def test_a_field_written_by_ctypes_is_read_by_cffi():
    """Both access the same memory."""
    struct = dlx.ctypes.DLManagedTensorVersioned()
    struct.version.major, struct.flags, struct.dl_tensor.ndim = 1, 5, 7
    struct.dl_tensor.dtype.bits = 16
    seen = ffi.cast("DLManagedTensorVersioned *", ctypes.addressof(struct))
    assert (seen.version.major, seen.flags, seen.dl_tensor.ndim, seen.dl_tensor.dtype.bits) == (1, 5, 7, 16)


@pytest.mark.parametrize("name", ["DLManagedTensor", "DLManagedTensorVersioned"])
def test_a_deleter_written_in_python_is_called_once(name):
    """A struct filled by ctypes, with a deleter in Python, is imported and released."""
    kind = getattr(dlx.ctypes, name)
    memory, shape, deleted = (ctypes.c_int16 * 4)(1, 2, 3, 4), (ctypes.c_int64 * 1)(4), []
    deleter = kind.Deleter(lambda self: deleted.append(self.contents.manager_ctx))
    struct = kind(manager_ctx=77, deleter=deleter)
    if name == "DLManagedTensorVersioned":
        struct.version.major = 1
    struct.dl_tensor = dlx.ctypes.DLTensor(
        data=ctypes.addressof(memory), device=(1, 0), ndim=1, dtype=(0, 16, 1), shape=shape
    )
    tensor = dlx.from_managed(ctypes.pointer(struct), legacy=name == "DLManagedTensor")
    assert (tensor.shape, str(tensor.dtype), tensor.data_ptr) == ((4,), "int16", ctypes.addressof(memory))
    del tensor
    assert deleted == [77]


def test_a_foreign_exchange_table_is_read(torch):
    """The exchange table of torch.Tensor has the header's version, and its slot returns a managed tensor."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        pytest.skip("this torch has no exchange table")
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = dlx.ctypes.DLPackExchangeAPI.from_address(get(capsule, b"dlpack_exchange_api"))
    assert table.header.version.major == 1
    source = torch.arange(4.0)
    made = ctypes.POINTER(dlx.ctypes.DLManagedTensorVersioned)()
    assert table.managed_tensor_from_py_object_no_sync(source, ctypes.byref(made)) == 0
    assert dlx.from_managed(made).data_ptr == source.data_ptr()


def test_the_standard_module_is_not_hidden():
    """`import ctypes` imports the standard library's module, also inside the module of the same name."""
    assert dlx.ctypes.ctypes is ctypes
    assert dlx.ctypes is not ctypes
