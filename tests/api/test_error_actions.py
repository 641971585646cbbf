"""Every refusal names the function that the user called, and never one that it calls inside."""

from __future__ import annotations

import copy
import pickle

import pytest

import dlx
from dlx import errors


class Nothing:
    """An object without any array."""


class Masked:
    """An array that no function can read."""

    def __dlpack__(self, **keywords):
        raise errors.LayoutError("it is masked")

    def __dlpack_device__(self):
        raise errors.LayoutError("it is masked")


def borrow(obj):
    """Borrow an array."""
    with dlx.borrow(obj):
        pass


READ_ONLY = memoryview(b"abc")
REFUSED = {  # the function, how its message begins, a call
    "array_namespace": ("find the namespace of", lambda obj: dlx.array_namespace(obj)),
    "borrow": ("borrow", borrow),
    "convert": ("convert", lambda obj: dlx.convert(obj, to="dlx")),
    "describe": ("describe", lambda obj: dlx.describe(obj)),
    "from_dlpack": ("convert", lambda obj: dlx.from_dlpack(obj)),
    "parts": ("split", lambda obj: dlx.parts(obj)),
    "ring": ("create a ring like", lambda obj: dlx.ring(2, like=obj)),
    "share": ("share", lambda obj: dlx.share(obj)),
    "shares_memory": ("compare the memory of", lambda obj: dlx.shares_memory(obj, b"abc")),
    "stack": ("stack", lambda obj: dlx.stack([obj], to="dlx")),
    "to_capsule": ("export", lambda obj: dlx.to_capsule(obj)),
}
HAVE_A_TARGET = {"convert", "from_dlpack", "stack"}


def refusal(call, *args):
    """Return the error that a call raises."""
    with pytest.raises(errors.DlxError) as caught:
        call(*args)
    return caught.value


@pytest.mark.parametrize("obj", [Nothing(), Masked()], ids=["no array", "a refused array"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_function(name, obj):
    """Even if the function converts internally, it is named; the message has a target if the function has one."""
    verb, call = REFUSED[name]
    error = refusal(call, obj)
    assert error.action == name
    assert str(error).startswith(f"cannot {verb} ")
    assert (" to 'dlx'" in str(error)) == (name in HAVE_A_TARGET)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("share", lambda obj: dlx.share({"a": obj})),
        ("share", lambda obj: dlx.share(like={"a": obj})),
        ("convert", lambda obj: dlx.convert({"a": obj}, to="dlx")),
        ("convert", lambda obj: dlx.convert({"a": obj}, to="dlx", lazy=True)["a"]),
        ("convert", lambda obj: dlx.plan({"a": obj}, to="dlx").run()),
        ("convert", lambda obj: dlx.using("dlx")(lambda a: a)({"a": obj})),
    ],
)
def test_a_refusal_inside_a_container_names_the_function(name, call):
    """The message is the same as at the root."""
    error = refusal(call, Masked())
    assert error.action == name and str(error).startswith(f"cannot {name} ")


def test_collected_refusals_name_the_function():
    """Each error of a group has it."""
    with pytest.raises(ExceptionGroup) as caught:
        dlx.convert([Masked(), Masked()], to="dlx", errors="collect")
    assert {error.action for error in caught.value.exceptions} == {"convert"}


def test_a_plan_has_the_error_of_convert():
    """`dlx.plan` raises nothing and shows the error of `convert`."""
    error = dlx.plan(Masked(), to="dlx").error
    assert error.action == "convert" and str(error) == str(refusal(dlx.convert, Masked(), "dlx"))


def test_the_outermost_function_is_named():
    """A function of dlx that is called by the code of a container does not name itself."""

    class Holder:
        def __dlx_tree__(self):
            return dlx.convert({"a": Masked()}, to="dlx"), dict

    error = refusal(dlx.share, [Holder()])
    assert error.action == "share" and str(error).startswith("cannot share ")


class Holder:
    """A container whose code calls another function of dlx."""

    def __dlx_tree__(self):
        return dlx.share([Masked()]), dict


@pytest.mark.parametrize("call", [dlx.convert, lambda obj, **options: dlx.plan(obj, **options).run()])
def test_the_outermost_function_is_named_in_each_error_of_a_group(call):
    """Functions called internally are not named."""
    with pytest.raises(ExceptionGroup) as caught:
        call([Holder(), Masked(), Holder()], to="dlx", errors="collect")
    assert [error.action for error in caught.value.exceptions] == ["convert"] * 3
    assert all(str(error).startswith("cannot convert ") for error in caught.value.exceptions)


@pytest.mark.parametrize("obj", [Holder(), [Holder()]], ids=["root", "inside"])
def test_plans_and_views_name_convert(obj):
    """Their errors name `convert`, although `convert` does not raise them."""
    plan = dlx.plan(obj, to="dlx")
    found = [plan.error, *(leaf.error for leaf in plan.leaves), refusal(plan.run)]
    found += [refusal(lambda: dlx.convert([obj], to="dlx", lazy=True).materialize())]
    found += [refusal(lambda: dlx.convert([Holder()], to="dlx", lazy=True)[0])]
    assert {error.action for error in found if error is not None} == {"convert"}
    assert all(str(error).startswith("cannot convert ") for error in found if error is not None)


@pytest.mark.parametrize("content", [b"", b"unknown", b"\x93NUMPY\x01\x00\x10\x00{'a"], ids=["empty", "unknown", "cut"])
def test_a_file_that_is_refused_cannot_be_opened(tmp_path, content):
    """The path is the object."""
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    error = refusal(dlx.open, path)
    assert error.action == "open" and str(error).startswith(f"cannot open {path}: ")


def test_a_file_that_was_closed_cannot_be_read(np, tmp_path):
    """The mapping is read after `open` has returned."""
    path = tmp_path / "x.npy"
    np.save(path, np.ones(3))
    view = dlx.open(path)
    view.close()
    error = refusal(lambda: view[""])
    assert error.action == "read" and str(error).startswith(f"cannot read {path}: ")


def test_what_was_shared_cannot_be_attached():
    """The target that cannot hold it is one of `attach`."""
    with dlx.share(READ_ONLY) as handle:
        error = refusal(lambda: dlx.attach(handle, "cupy" if not _has("cupy") else "nothing"))
        assert error.action == "attach"
        forged = {**handle, "token": "00"}
    assert refusal(dlx.attach, forged).action == "attach"


def _has(name):
    from importlib.util import find_spec

    return find_spec(name) is not None


@pytest.mark.parametrize(
    ("name", "call"),
    [("from_pointer", lambda: dlx.from_pointer(0, (3,), "float32")), ("from_managed", lambda: dlx.from_managed(0))],
)
def test_memory_at_an_address(name, call):
    """The address comes from a C function."""
    assert refusal(call).action == name


def test_an_empty_tensor():
    """The dtype is unknown."""
    assert refusal(dlx.empty, (3,), "float33").action == "empty"


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copies_of_an_error_name_the_function(way):
    """Copies and pickles have the same message."""
    error = refusal(dlx.share, Masked())
    again = way(error)
    assert again.action == "share" and str(again) == str(error)


def test_the_default_is_convert():
    """An error that a library makes itself, or an adapter's hook raises outside of any call."""
    assert errors.ConversionError("because").action == "convert"
    assert str(errors.ConversionError("because", source="x")) == "cannot convert x: because"


def test_every_public_function_names_itself():
    """A function that is missing here is untested: list it, or explain why it refuses no object."""
    refuse_nothing = {"plan", "open", "attach", "using", "trace", "adapters", "devices", "release_pending"}
    refuse_nothing |= {"save"}  # names the members that are no arrays, see tests/files/test_save.py
    others = {"empty", "from_managed", "from_pointer", "cffi_builder", "get_include"}
    functions = {name for name in dlx.__all__ if callable(getattr(dlx, name)) and name[0].islower()}
    assert functions - set(REFUSED) - refuse_nothing - others == {"hookimpl"}


@pytest.mark.parametrize(
    "name", ["array_namespace", "borrow", "describe", "from_dlpack", "shares_memory", "to_capsule"]
)
def test_a_container_is_not_said_to_lack_an_adapter(name):
    """Functions of one array report that it is a container, and name functions that accept it."""
    error = refusal(REFUSED[name][1], [b"abc"])
    assert error.reason == "it is a container, not one array"
    assert "dlx.convert" in error.fix
