"""Other interpreters: a second one in the process, one without the GIL; and static thread-local storage."""

import os
import struct
import sys
import sysconfig

import pytest

from dlx import _ffi

# A second interpreter, which any library may create: afterwards PyGILState_Check() returns 1 on every thread.
PREAMBLE = """
import ctypes, sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
from dlx._core import native
class Owner:
    gone = 0
    def __init__(self):
        self.memory = bytearray(1024)
    def __del__(self):
        Owner.gone += sum(n for n in range(3)) > 0
def over():
    owner = Owner()
    at = native.buffer_address(memoryview(owner.memory))
    return native.tensor_new(at, (4,), None, (2, 32, 1), (1, 0), 0, owner)
"""

FOREIGN = """
free, held = ctypes.CDLL(sys.argv[1]), ctypes.PyDLL(sys.argv[1])
held.counting_consume.restype, held.counting_consume.argtypes = ctypes.c_void_p, [ctypes.py_object]
for function in free.counting_delete_on_thread, free.counting_delete, held.counting_delete:
    function.argtypes = [ctypes.c_void_p, ctypes.c_int]
"""


@pytest.mark.parametrize("alive", [False, True], ids=["gone", "alive"])
def test_foreign_threads_release_after_a_second_interpreter_was_made(python, counting, alive):
    """Any thread releases memory once, with the GIL, also after a second interpreter existed."""
    made = "other = interpreters.create()\n" + ("" if alive else "interpreters.destroy(other)\n")
    out = python(
        PREAMBLE
        + FOREIGN.replace("sys.argv[1]", repr(counting.path))
        + made
        + "for n in range(1, 20):\n"
        + "    for delete in free.counting_delete_on_thread, free.counting_delete, held.counting_delete:\n"
        + "        delete(held.counting_consume(over().__dlpack__(max_version=(1, 0))), 0)\n"
        + "    assert Owner.gone == 3 * n, Owner.gone\n"
        + ("interpreters.destroy(other)\n" if alive else "")
        + "print(native.live())"
    )
    assert out.split() == ["0"]


def test_releases_inside_another_interpreter(python, counting):
    """A thread that runs another interpreter holds the GIL, too, and must not wait for it."""
    python(
        PREAMBLE
        + FOREIGN.replace("sys.argv[1]", repr(counting.path))
        + """
address = held.counting_consume(over().__dlpack__(max_version=(1, 0)))
code = f'''
import ctypes
held = ctypes.PyDLL({sys.argv[1]!r})
held.counting_delete.argtypes = [ctypes.c_void_p, ctypes.c_int]
held.counting_delete({address}, 0)
'''
if hasattr(interpreters, "new_config"):
    other = interpreters.create("legacy")
else:
    other = interpreters.create(isolated=False)
failed = interpreters.run_string(other, code)
assert not failed, failed
interpreters.destroy(other)
assert Owner.gone == 1 and native.live() == 0
""".replace("{sys.argv[1]!r}", repr(counting.path))
    )


def test_a_second_interpreter_is_refused(python):
    """Dlx's types exist once per process: importing it in a second interpreter fails, and the first one continues."""
    out = python(
        PREAMBLE
        + """
import dlx
before = over()
code = '''
import dlx
for name in ("convert", "Tensor", "ffi"):
    try:
        getattr(dlx, name)
    except ImportError as error:
        print(error)
    else:
        raise SystemExit(f"dlx.{name} was not refused")
'''
if hasattr(interpreters, "new_config"):
    other = interpreters.create("legacy")
else:
    other = interpreters.create(isolated=False)
failed = interpreters.run_string(other, code)
assert not failed, failed
interpreters.destroy(other)
assert dlx.convert(over(), "dlx").shape == (4,)
assert native.capsule_claim(before.__dlpack__()).shape == (4,)
try:
    native.capsule_claim(1)
except dlx.errors.ProtocolError:
    print("well")
"""
    )
    *refusals, last = out.splitlines()
    assert last == "well"
    assert len(refusals) == 3
    for text in refusals:
        if sysconfig.get_config_var("Py_GIL_DISABLED"):  # such a Python refuses the import itself
            assert "subinterpreters" in text, text
            continue
        assert "interpreter 0" in text and "interpreter 1" in text and "multiprocessing" in text, text


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has the GIL")
def test_the_gil_stays_off(python):
    """Neither dlx nor its adapters and extensions enable the GIL; if the user enables it, it stays on."""
    check = """
        import importlib, sys
        from dlx._registry.plugin import BUILT_IN
        for name in {*BUILT_IN.values(), *(f"dlx_adapters._dlx_{name}" for name in ("numpy", "torch", "tvm_ffi"))}:
            importlib.import_module(name)
        import dlx
        print(sys._is_gil_enabled(), dlx.convert(b"a", "dlx").shape)
    """
    without = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    assert python(check, env=without).strip() == "False (1,)"
    asked = "import dlx, sys; print(sys._is_gil_enabled(), dlx.convert(b'a', 'dlx').shape)"
    assert python(asked, env=without | {"PYTHON_GIL": "1"}).strip() == "True (1,)"


@pytest.mark.skipif(sys.platform != "linux", reason="reads an ELF file")
def test_static_tls_is_a_few_words():
    """A library that is loaded late gets little static thread-local storage: dlx uses at most five words."""
    with open(_ffi.__file__, "rb") as file:
        binary = file.read()
    assert binary[:5] == b"\x7fELF\x02"
    at, (size, count) = struct.unpack_from("<Q", binary, 32)[0], struct.unpack_from("<HH", binary, 54)
    headers = [struct.unpack_from("<II6Q", binary, at + size * n) for n in range(count)]
    used = [header[6] for header in headers if header[0] == 7]  # PT_TLS: bytes in memory
    assert sum(used) <= 40
