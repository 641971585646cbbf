"""A forked child never waits for a lock of another thread of its parent."""

from __future__ import annotations

import pytest
from support.project import ROOT

FORKED = """
    import os, signal, threading, warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about forks with threads, the subject here
    signal.alarm(60)
    held, done = threading.Event(), threading.Event()

    def forked(call, *, needs=None):
        "Fork while a thread is inside `needs`; return what `call` gives in the child within ten seconds."
        thread = threading.Thread(target=needs)
        thread.start()
        assert held.wait(10)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            os.write(write, repr(call()).encode())
            os._exit(0)
        os.close(write)
        _, status = os.waitpid(child, 0)
        done.set()
        thread.join()
        assert status == 0, f"the child ended with status {status}"
        return os.read(read, 1000).decode()

    def slow(value):
        "Return a value; in the first thread that asks, when told to."
        if not held.is_set():
            held.set()
            assert done.wait(30)
        return value

    import dlx
"""


def test_a_child_converts_what_a_thread_of_its_parent_was_converting(python):
    """A data loader's worker and a prefetching thread; the source is an unregistered type."""
    out = python(
        FORKED
        + """
    class Slow:
        def __init__(self, n):
            self.array = dlx.convert(bytearray([n]), to="dlx")
        def __dlpack__(self, **options):
            return slow(self.array).__dlpack__(**options)
        def __dlpack_device__(self):
            return 1, 0

    view = dlx.convert([Slow(1), [Slow(2)]], to="dlx", lazy=True)
    first = lambda x: bytes(memoryview(x))[0]
    print(forked(lambda: [first(view[0]), first(view[1][0]), view[0] is view[0]], needs=lambda: view[0]))
    print(first(view[0]), first(view[1][0]))
    """
    )
    assert out.splitlines() == ["[1, 2, True]", "1 2"]


def test_a_child_forked_inside_a_conversion_goes_on(python):
    """The forking thread keeps its locks, and releases them in the child, too."""
    out = python(
        FORKED
        + """
    class Forks:
        def __dlpack__(self, **options):
            self.pid = os.fork()
            return dlx.convert(bytearray(3), to="dlx").__dlpack__(**options)
        def __dlpack_device__(self):
            return 1, 0

    source = Forks()
    view = dlx.convert([source, [source]], to="dlx", lazy=True)
    assert view[0].shape == (3,) and view[1][0] is view[0]
    from dlx._support.locks import lock_of

    lock = lock_of(view._scope)
    thread = threading.Thread(target=lambda: lock.acquire(timeout=5) and lock.release() or held.set())
    thread.start()
    thread.join()
    assert held.is_set()
    if source.pid:
        assert os.waitpid(source.pid, 0)[1] == 0
    else:
        os._exit(0)
    print("ok")
    """
    )
    assert out == "ok\n"


def test_a_child_finds_the_registry_free(python):
    """Another thread reads entry points during the fork; the child reads them again."""
    out = python(
        FORKED
        + """
    from dlx._registry import plugin as plugins
    from dlx._registry.registry import registry
    discover = plugins.discover
    plugins.discover = lambda: slow(list(discover()))
    print(forked(lambda: len(registry.load_all()) > 3, needs=registry._loader.scan))
    """
    )
    assert out == "True\n"


def test_a_child_loads_a_plugin_that_a_thread_of_its_parent_was_loading(python):
    """A thread of the child can load it, too, even if it has the same id."""
    out = python(
        FORKED
        + """
    import types
    from dlx.adapter import Adapter
    from dlx._registry.plugin import Plugin
    from dlx._registry.registry import registry

    class Mine(Adapter):
        name = package = "mine"

    module = types.ModuleType("dlx_mine")
    module.dlx_adapters = dlx.hookimpl(lambda: [Mine()])
    plugin = registry._loader.plugins["mine"] = Plugin("dlx_mine", lambda: slow(module), "dlx-mine", names=("mine",))

    def child():
        numbers = {me[1] if isinstance(me, tuple) else me for me in plugin.loading}
        assert numbers, "not loaded"
        threading.get_ident = lambda: numbers.copy().pop()
        return [adapter.name for adapter in registry._loader.load("mine").adapters]

    print(forked(child, needs=lambda: registry._loader.load("mine")))
    """
    )
    assert out == "['mine']\n"


def test_a_child_asks_adapters_for_what_they_remember(python):
    """Cached values of adapters, including third parties', are computed without a lock."""
    out = python(
        FORKED
        + """
    import functools
    from dlx.adapter import Adapter, KnownIssue

    class Slow(Adapter):
        name, package = "slow", "sys"
        @property
        def known_issues(self):
            return slow((KnownIssue("it is slow", "", lowers={"speed": 0}),))
        @functools.cached_property
        def mine(self):
            return slow(1)

    class Other(Slow):
        known_issues = (KnownIssue("it is slow", "", lowers={"speed": 0}),)

    print(forked(lambda: Other().lowered == {"speed": 0}, needs=lambda: Slow().lowered))
    held.clear(), done.clear()
    print(forked(lambda: Other().mine, needs=lambda: Slow().mine))
    """
    )
    assert out == "True\n1\n"


def test_locks_are_not_kept_alive(np):
    """A lock does not keep its object alive."""
    import gc
    import weakref

    import dlx
    from dlx._support import locks

    view = dlx.convert([(np.ones(1),)], to="dlx", lazy=True)
    view[0]
    scope = weakref.ref(view._scope)
    assert scope() in locks._holders
    del view
    gc.collect()
    assert scope() is None


def test_every_lock_of_dlx_is_renewed():
    """Only the fork-safe module creates locks."""
    for folder in ("dlx", "dlx_adapters"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if path.stem != "locks" and "testing" not in path.parts:  # the kit's locks are local to a check
                assert not any(f"{name}(" in text for name in ("Lock", "Condition", "Semaphore", "Event")), path


pytestmark = pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="there is no fork here")
