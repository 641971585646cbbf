"""The interpreter exits while dlx's memory is still in use: exit status 0, nothing on stderr."""

import pytest
from support.project import TESTS

# Each script starts with a class whose objects own memory, and a tensor over such an object.
PREAMBLE = """
import sys
from dlx._core import native
class Owner:
    def __init__(self):
        self.memory = bytearray(1024)
    def __del__(self):
        self.memory = None
def over(owner=None):
    owner = owner or Owner()
    at = native.buffer_address(memoryview(getattr(owner, "memory", owner)))
    return native.tensor_new(at, (4,), None, (2, 32, 1), (1, 0), 0, owner)
"""

PEERS = {
    "dlx": "results = [over(), over().__dlpack__(), over().__dlpack__(max_version=(1, 0))]\n"
    "results += [native.capsule_claim(over().__dlpack__()), native.tensor_copy(over(), True)]\n"
    "results += [native.tensor_view(results[0], None, None, None, Owner())]\n",
    "numpy": "import numpy as np\n"
    "results = [np.from_dlpack(over()), np.arange(4.0)]\n"
    "results += [native.capsule_claim(a.__dlpack__(max_version=(1, 0))) for a in results]\n",
    "numpy and torch": "import numpy as np, torch\n"
    "results = [np.from_dlpack(torch.from_dlpack(over())), torch.from_dlpack(np.from_dlpack(over()))]\n"
    "results += [torch.from_dlpack(over()), torch.arange(4.0)]\n"
    "results += [native.capsule_claim(a.__dlpack__()) for a in results]\n",
}

HOLDERS = {
    "globals": "held = results\n",
    "cycle": "class Node: pass\nnode = Node(); node.self = node; node.results = results\ndel results, node\n",
    "daemon": "import threading\n"
    "started = threading.Event()\n"
    "def hold(results):\n"
    "    started.set()\n"
    "    threading.Event().wait()\n"
    "threading.Thread(target=hold, args=(results,), daemon=True).start()\n"
    "started.wait()\n"
    "del results\n",
    "builtins": "import builtins\nbuiltins.held_to_the_end = results\nsys.held = results\n",
}


@pytest.mark.few(4)
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.numpy("2.2.5")
def test_exit_with_results_alive(request, python, peer, holder):
    """The interpreter exits silently, no matter which object holds which memory."""
    for name, fixture in (("numpy", "np"), ("torch", "torch")):
        if name in peer:
            request.getfixturevalue(fixture)
    code = "import gc\ngc.unfreeze()\n" + PREAMBLE + PEERS[peer] + HOLDERS[holder] + "print('done')"
    assert python(code, imported="torch" in peer) == "done\n"


FOREIGN = """
sys.path.insert(0, {tests!r})
from support.foreign.counting import Counting
counting = Counting({path!r})
def consumed(tensor):
    return counting.consume(tensor.__dlpack__(max_version=(1, 0)))
"""


@pytest.fixture
def foreign_python(python, counting):
    """Run code with the preamble's tensors and counting.c; `first` runs before dlx is imported."""
    preamble = PREAMBLE + FOREIGN.format(tests=str(TESTS), path=counting.path)
    return lambda code, first="": python(first + preamble + code)


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_deleters_after_the_interpreter(foreign_python, where):
    """Deleters called from C atexit, on the main or another thread, leak a Python owner instead of crashing."""
    out = foreign_python(f"counting.delete_at_exit({where}=consumed(over()))")
    assert out == "at exit: interpreter 0, deleted 0\n"


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_foreign_memory_after_the_interpreter(foreign_python, where):
    """Memory without a Python owner is released by its foreign deleter, even after finalisation."""
    out = foreign_python(f"""
tensor = native.capsule_claim(counting.capsule())
counting.delete_at_exit({where}=consumed(tensor))
del tensor
assert counting.deleted == 0
""")
    assert out == "at exit: interpreter 0, deleted 1\n"


@pytest.mark.parametrize("thread", [False, True], ids=["here", "foreign-thread"])
@pytest.mark.parametrize("holder", ["globals", "builtins", "cycle"])
def test_deleters_during_finalisation(foreign_python, thread, holder):
    """A deleter called during module teardown neither hangs nor crashes, even on a thread that is joined."""
    hold = {
        "globals": "late = Late()",
        "builtins": "import builtins; builtins.late = Late()",
        "cycle": "late = Late(); late.itself = late; del late",
    }[holder]
    # The owner is not of a class of this script: it would keep the script's globals alive, hidden from the collector.
    code = f"""
import os
class Late:
    def __init__(self):
        self.address = consumed(over(bytearray(64)))
    def __del__(self, delete=counting.delete, write=os.write):
        delete(self.address, thread={thread})
        write(1, b'deleted\\n')
{hold}
"""
    assert foreign_python(code) == "deleted\n"


def test_a_thread_that_deletes_on_and_on(foreign_python):
    """A daemon thread that creates and releases tensors does not disturb the exit."""
    code = """
import threading
started = threading.Event()
def work():
    while True:
        counting.delete(consumed(over()), thread=True)
        native.tensor_copy(over(), True)
        started.set()
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
started.wait()
print('done')
"""
    assert foreign_python(code) == "done\n"


@pytest.mark.parametrize("registered", ["before dlx", "after dlx"])
def test_deleters_on_other_threads_at_pythons_atexit(foreign_python, registered):
    """At atexit, handlers registered after dlx still release Python objects; earlier ones run later and leak them."""
    register = "import atexit\nlast = []\natexit.register(lambda: counting.delete(last.pop(), thread=True))\n"
    code = """
class Told(Owner):
    def __del__(self):
        print('released')
last.append(consumed(over(Told())))
"""
    if registered == "before dlx":
        assert foreign_python(code, first=register) == ""
    else:
        assert foreign_python(register + code) == "released\n"


def test_results_leave_before_the_interpreter(python):
    """Owners in module globals are released at Python's atexit, while the interpreter is still complete."""
    code = """
import atexit
class Told(Owner):
    def __del__(self):
        print('released')
held = [over(Told())]
atexit.register(held.clear)
"""
    assert python(PREAMBLE + code) == "released\n"


def test_an_error_at_the_end_says_so(python, np):
    """A framework that Python has already unloaded is not reported as missing."""
    code = """
import builtins, dlx, numpy
class Bytes(bytearray):  # not on the fast path
    pass
class Late:
    def __del__(self, convert=dlx.convert, source=Bytes(3), print=print, Exception=Exception):
        try:
            convert(source, to="numpy")
        except Exception as error:
            print(error)
builtins.late = Late()
dlx.convert(bytearray(3), to="numpy")
"""
    assert "not installed" not in (said := python(code)) and "Python is exiting" in said


@pytest.mark.parametrize(
    "passed", [pytest.param("np.ones(3)", marks=pytest.mark.slow), "np.ones(3)[::-1]"], ids=["shared", "copied"]
)
@pytest.mark.parametrize("keep", ["np", pytest.param("__main__", marks=pytest.mark.slow)])
def test_generators_of_using_that_outlive_the_program(request, python, keep, passed):
    """They are closed after dlx's modules are cleared."""
    request.getfixturevalue("torch")
    code = (
        "import __main__, numpy as np, dlx\n"
        "@dlx.using('torch', writes='x')\n"
        "def filled(x):\n"
        "    try:\n"
        "        yield x\n"
        "    finally:\n"
        "        x.fill_(3)\n"
        f"{keep}.kept = filled({passed})\n"
        f"next({keep}.kept)\n"
        "print('done')"
    )
    assert python(code) == "done\n"
