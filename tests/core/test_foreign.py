"""Foreign exceptions, values and classes that misbehave on inspection never hide the error."""

from __future__ import annotations

import dataclasses
import gc
import json
import textwrap
import weakref
from types import SimpleNamespace

import pytest
from support.plugins.distributions import Site, adapter

import dlx
from dlx._support.reflect import MAX_MESSAGE, TypeCache, exception_text, is_key, safe_repr, type_name
from dlx.errors import AdapterNotFoundError, ConversionError, DlxError

# ---- exceptions ------------------------------------------------------------------------------------------------------


class Unsayable(Exception):
    def __str__(self):
        raise ValueError("no words")

    __repr__ = __str__


class Wordless(type):
    def __getattribute__(cls, name):
        if name == "__subclasses__":  # tblib and pint inspect all classes on import
            return type.__getattribute__(cls, name)
        raise RuntimeError(f"no {name}")


class Nameless(Exception, metaclass=Wordless):
    pass


class Text(str):
    def __len__(self):
        return 0

    __getitem__ = __format__ = __str__ = None


class Odd(Exception):
    def __str__(self):
        return Text("a subclass of str")


class NotText(Exception):
    def __str__(self):
        return 3


LONG = "x" * 100_000
ERRORS = {
    "no str": (Unsayable, "Unsayable: its message cannot be shown (ValueError)"),
    "no name": (lambda: Nameless("said"), "Nameless: said"),
    "odd str": (Odd, "Odd: a subclass of str"),
    "str gives 3": (NotText, "NotText: its message cannot be shown (TypeError)"),
    "long": (lambda: ValueError(LONG), f"ValueError: {'x' * MAX_MESSAGE}... (99,000 more characters)"),
}


@dataclasses.dataclass
class Lying:
    """An array that raises in a selected method."""

    error: BaseException
    at: str

    def __dlpack__(self, *, max_version=None, stream=None):
        if self.at == "__dlpack__":
            raise self.error
        return dlx.empty((2,), "int8").__dlpack__(max_version=max_version)

    def __dlpack_device__(self):
        if self.at == "__dlpack_device__":
            raise self.error
        return (1, 0)


class Opening(dict):
    def __init__(self, error):
        self.error = error

    def keys(self):
        raise self.error


class Interface:
    def __init__(self, error):
        self.error = error

    @property
    def __array_interface__(self):
        raise self.error


class Failing:
    def __init__(self, error):
        self.error = error

    def __index__(self):
        raise self.error


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.parametrize(
    "made",
    [
        lambda error: Lying(error, "__dlpack__"),
        lambda error: Lying(error, "__dlpack_device__"),
        lambda error: [Lying(error, "__dlpack__")],
        Opening,
        Interface,
    ],
)
def test_an_error_of_others_never_hides_what_happened(made, case):
    """The error has the foreign class and message, or says that there is no message; it is the cause; `plan` agrees."""
    make, text = ERRORS[case]
    error = make()
    with pytest.raises(ConversionError) as caught:
        dlx.convert(made(error), to="dlx")
    assert text in str(caught.value)
    assert caught.value.__cause__ is error
    assert len(str(caught.value)) < MAX_MESSAGE + 300
    planned = dlx.plan(made(error), to="dlx").error
    assert str(planned) == str(caught.value)
    assert text in str(dlx.plan(made(error), to="dlx"))


@pytest.mark.parametrize("case", ERRORS)
def test_an_exception_as_text(case):
    """The class and the message, truncated to a stated length."""
    make, text = ERRORS[case]
    assert exception_text(make()) == text


def test_interrupts_and_memory_errors_go_on():
    """They propagate even if the exception's message raises them."""
    for kind in (KeyboardInterrupt, MemoryError):

        class Interrupting(Exception):
            def __str__(self, kind=kind):
                raise kind

        with pytest.raises(kind):
            exception_text(Interrupting())


def test_a_value_that_has_no_repr_is_named_by_its_class():
    """A long repr is truncated."""
    assert safe_repr(Unsayable()) == "<Unsayable>"
    assert safe_repr(LONG) == f"'{'x' * 59}... (99,942 more characters)"


ADAPTERS = """
class Bad(Exception):
    def __str__(self): raise ValueError('no words')
def boom(*a, **k): raise Bad
A.{hook}
@dlx.hookimpl"""


def test_adapters_that_raise_what_cannot_be_shown(tmp_path, np):
    """For every hook that `convert` calls, the error names the framework and the exception's class."""
    site = Site(tmp_path)
    plain = ("capabilities", "load", "describe", "export")
    hooks = {method: f"{method} = boom" for method in plain}
    hooks |= {
        "consume": "arrays = Arrays(consume=boom)",
        "current": "devices = type('D', (Devices,), {'current': boom})()",
    }
    methods = tuple(hooks)
    for method in methods:
        name = f"lib_{method}"
        site.module(name)
        raising = ADAPTERS.format(hook=hooks[method])
        site.plugin(f"dlx-{method}", name, adapter(name).replace("@dlx.hookimpl", raising))
    code = """
        import importlib, json
        said = {}
        for method in METHODS:
            name = "lib_" + method
            lib = importlib.import_module(name)
            ways = {
                "in": lambda: dlx.convert.__wrapped__(dlx.empty((3,), "int8"), to=name, device="cpu"),
                "out": lambda: dlx.convert(lib.Array(dlx.empty((3,), "int8")), to="dlx"),
            }
            for way, call in ways.items():
                try: call()
                except dlx.errors.DlxError as error: said[f"{method} {way}"] = str(error)
                except Exception as error: said[f"{method} {way}"] = f"RAW {type(error).__name__}"
        print(json.dumps(said))
    """
    said = json.loads(site.run(f"METHODS = {methods}\n" + textwrap.dedent(code)))
    assert {key.partition(" ")[0] for key in said} == set(methods)
    for key, text in said.items():
        if key != "classes out":  # such types are skipped
            assert "Bad: its message cannot be shown (ValueError)" in text or key == "classes in", (key, text)


def test_the_command_tells_them_too(tmp_path, python):
    """`dlx inspect mod:x` prints one line and exits with 2; long text is truncated with its length."""
    (tmp_path / "shop.py").write_text(
        textwrap.dedent("""
            class Bad(Exception):
                def __str__(self): raise ValueError("no words")
            class Module:
                @property
                def bad(self): raise Bad
                @property
                def long(self): raise ValueError("x" * 100_000)
                @property
                def ends(self): raise SystemExit(Bad())
            class Array:
                def __init__(self, error): self.error = error
                def __dlpack__(self): raise self.error
                def __dlpack_device__(self): return (1, 0)
            shop = Module()
            bad, long = Array(Bad()), Array(ValueError("x" * 100_000))
        """)
    )
    said = {}
    for name in ("shop.bad", "shop.long", "shop.ends", "bad", "long"):
        out = python(
            f"""
            import contextlib, io, sys
            sys.path.insert(0, {str(tmp_path)!r})
            from dlx.cli import main
            err, out = io.StringIO(), io.StringIO()
            with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
                status = main(["inspect", "shop:{name}", "--to", "none"])
            print(status, err.getvalue().splitlines()[-1], " ".join(out.getvalue().split()))
            """
        )
        said[name] = out
    shown = "Bad: its message cannot be shown (ValueError)"
    assert said["shop.bad"].startswith("2 ") and shown in said["shop.bad"]
    assert said["shop.ends"].startswith("2 ")
    assert said["bad"].startswith("0 ") and shown in said["bad"]
    for name in ("shop.long", "long"):
        assert "more characters)" in said[name] and len(said[name]) < 3000, said[name]


# ---- classes ---------------------------------------------------------------------------------------------------------


class NoModule:
    pass


NoModule.__module__ = None


class Unhashing(type):
    def __eq__(cls, other):
        return cls is other


class Raising(type):
    def __hash__(cls):
        raise RuntimeError("no hash")

    def __eq__(cls, other):
        raise RuntimeError("no eq")

    def __getattribute__(cls, name):
        raise RuntimeError(f"no {name}")


class Unhashable(metaclass=Unhashing):
    pass


class Unreadable(metaclass=Raising):
    pass


def _unbound(self, *arguments):
    raise RuntimeError("working outside of a context")


class Proxy:
    """Like werkzeug's unbound LocalProxy."""

    __slots__ = ("_held",)
    __getattribute__ = __len__ = __iter__ = __getitem__ = __bool__ = __eq__ = __hash__ = __repr__ = __str__ = _unbound
    __dict__ = property(_unbound)
    __class__ = property(_unbound)


FOREIGN = {"no module": NoModule, "unhashable": Unhashable, "unreadable class": Unreadable, "proxy": Proxy}


@pytest.mark.parametrize("to", ["dlx", "numpy"])
@pytest.mark.parametrize("case", FOREIGN)
def test_what_merely_stands_in_a_tree_passes_through(case, to, np):
    """Objects of any class are passed through, even if errors are collected; the plan counts only arrays."""
    obj, array = FOREIGN[case](), dlx.empty((2,), "int8")
    assert dlx.convert([obj], to=to)[0] is obj
    assert dlx.convert({"a": array, "o": [obj]}, to=to)["o"][0] is obj
    assert dlx.convert((array, obj), to=to, errors="collect")[1] is obj
    for errors in ("raise", "collect"):
        plan = dlx.plan([array, obj], to=to, errors=errors)
        assert plan.error is None
        assert len(plan.leaves) == 1


@pytest.mark.parametrize("case", FOREIGN)
def test_strict_refuses_it_and_names_its_class(case):
    """One error, or one for each path."""
    kind = FOREIGN[case]
    obj, array = kind(), dlx.empty((2,), "int8")
    with pytest.raises(AdapterNotFoundError, match=r"not an array, a container or plain data") as caught:
        dlx.convert([array, obj], to="dlx", strict=True)
    assert caught.value.source == type_name(kind)
    assert caught.value.where == "obj[1]"
    with pytest.raises(ExceptionGroup) as group:
        dlx.convert([array, obj, obj], to="dlx", strict=True, errors="collect")
    assert [error.where for error in group.value.exceptions] == ["obj[1]", "obj[2]"]
    assert isinstance(dlx.plan([array, obj], to="dlx", strict=True).error, AdapterNotFoundError)


@pytest.mark.parametrize("case", FOREIGN)
def test_at_the_root_it_is_no_array(case, np):
    """Every function raises an error that can be printed."""
    obj = FOREIGN[case]()
    for call in (
        lambda: dlx.convert(obj, to="numpy"),
        lambda: dlx.convert(dlx.empty((2,), "int8"), like=obj),
        lambda: dlx.describe(obj),
        lambda: dlx.from_dlpack(obj),
        lambda: dlx.to_capsule(obj),
        lambda: dlx.stack([dlx.empty((2,), "int8"), obj], "dlx"),
        lambda: dlx.stack([obj, [1, 2]], "dlx", dtype="int8"),
        lambda: dlx.shares_memory(dlx.empty((2,), "int8"), obj),
    ):
        with pytest.raises(AdapterNotFoundError) as caught:
            call()
        assert str(caught.value)
    plan = dlx.plan(obj, to="numpy")
    assert isinstance(plan.error, AdapterNotFoundError)
    assert str(plan)


@pytest.mark.numpy("2.1")
def test_containers_and_arrays_of_a_class_that_is_no_key(np):
    """A metaclass without a hash does not affect its classes."""

    class Items(list, metaclass=Unhashing):
        pass

    class Names(dict, metaclass=Unhashing):
        pass

    @dataclasses.dataclass
    class Record(metaclass=Unhashing):
        x: object

    class Array(np.ndarray, metaclass=Unhashing):
        pass

    class Producer(metaclass=Unhashing):
        def __dlpack__(self, **options):
            return np.zeros(3).__dlpack__(**options)

        def __dlpack_device__(self):
            return (1, 0)

    array = np.zeros(2)
    for obj, inside in (
        (Items([array]), lambda new: new[0]),
        (Names(a=array), lambda new: new["a"]),
        (Record(array), lambda new: new.x),
    ):
        for new in (dlx.convert(obj, to="dlx"), dlx.convert([obj], to="dlx")[0]):
            assert type(new) is type(obj)
            assert type(inside(new)) is dlx.Tensor
    for obj in (np.zeros(3).view(Array), Producer()):
        assert dlx.convert(obj, to="dlx").shape == (3,)
        assert dlx.convert([obj], to="dlx")[0].shape == (3,)
        assert dlx.describe(obj)


def test_what_is_remembered_of_a_class():
    """No code of a metaclass runs, and unhashable classes are not cached."""
    known = TypeCache()
    for kind in (int, NoModule, Unhashable, Unreadable):
        assert known.keep(kind, kind) is kind
        assert known.find(kind) is (kind if is_key(kind) else None)
    assert not is_key(Unhashable)
    assert not is_key(Unreadable)
    assert type_name(Unreadable) == "test_foreign.Unreadable"
    assert type_name(NoModule) == "NoModule"
    assert type_name(SimpleNamespace) == "types.SimpleNamespace"
    assert issubclass(DlxError, Exception)


def test_what_is_remembered_of_a_class_goes_with_it():
    """The class is not kept alive, and its cache entry is dropped with it."""
    known = TypeCache()
    kind = type("Short", (), {})
    known.keep(kind, 1)
    assert (known.find(kind), len(known)) == (1, 1)
    del kind
    gc.collect()
    assert len(known) == 0


def test_an_error_keeps_no_array_alive(np):
    """A producer's MemoryError and a failed `stack` create no reference cycle with frames."""

    class Failing:
        def __dlpack__(self, **keywords):
            raise MemoryError("now")

        def __dlpack_device__(self):
            return (1, 0)

    class Watched(np.ndarray):
        pass

    def fail(obj, function, kind):
        try:
            function(obj)
        except kind:
            return weakref.ref(obj)
        raise AssertionError("nothing was raised")

    gc.collect()
    gc.disable()
    try:
        ref = fail(Failing(), lambda obj: dlx.convert(obj, to="dlx"), MemoryError)
        assert ref() is None
        stacked = np.zeros(3, "c8").view(Watched)
        ref = fail(stacked, lambda obj: dlx.stack([obj] * 2, to="pyarrow"), DlxError)
        del stacked
        assert ref() is None
    finally:
        gc.enable()
