"""The exception classes: builtin bases, one message format, attributes for programs."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
from pathlib import Path

import pytest

import dlx
from dlx import errors
from dlx._core import native
from dlx.cli.targets import command_option

ROOT = Path(__file__).resolve().parent.parent.parent
FAMILY = {  # class: base class in dlx, builtin base class
    "DlxError": (Exception, Exception),
    "ConversionError": (errors.DlxError, BufferError),
    "CopyRequiredError": (errors.ConversionError, ValueError),
    "ReadOnlyError": (errors.ConversionError, ValueError),
    "LayoutError": (errors.ConversionError, ValueError),
    "DTypeError": (errors.ConversionError, TypeError),
    "DeviceError": (errors.ConversionError, RuntimeError),
    "DeviceNameError": (errors.DeviceError, ValueError),
    "StreamError": (errors.ConversionError, ValueError),
    "ProtocolError": (errors.ConversionError, ValueError),
    "ConsumedError": (errors.ProtocolError, ValueError),
    "FileError": (errors.DlxError, ValueError),
    "HandleError": (errors.DlxError, ValueError),
    "AdapterNotFoundError": (errors.DlxError, TypeError),
    "FrameworkNotInstalledError": (errors.DlxError, ImportError),
    "PluginError": (errors.DlxError, RuntimeError),
}
PARTS = {
    "source": "numpy.ndarray (float32[4], strides=(-1,))",
    "target": "torch",
    "path": ("a", 3),
    "root": "",
    "option": (("copy", None),),
    "via": "",
    "details": (("alignment", ", found 16"),),
    "sharing": True,
}
SAID = {"reason": "because, found 16", "brief": "because", "where": "obj['a'][3]", "fix": "Drop copy=False."}
every = pytest.mark.parametrize("name", FAMILY)


def test_the_family_is_complete():
    """Every public error of dlx.errors is listed here; the other names are the path steps."""
    assert sorted(errors.__all__) == sorted([*FAMILY, "Attribute", "Member"])
    defined = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert defined == set(FAMILY)


@every
def test_bases(name):
    """Each class has the listed bases, including the builtin that callers catch."""
    kind, (base, builtin) = getattr(errors, name), FAMILY[name]
    assert kind.__bases__[0] is base and issubclass(kind, builtin) and issubclass(kind, errors.DlxError)


@every
def test_conversion_errors_are_buffer_errors(name):
    """Errors of a conversion are BufferErrors, as in the array API standard; others are not."""
    kind = getattr(errors, name)
    assert issubclass(kind, BufferError) == issubclass(kind, errors.ConversionError)


@every
def test_documented(name):
    """Each class has a one-line docstring that says when it is raised."""
    assert inspect.getdoc(getattr(errors, name)).splitlines()[0].endswith(".")


TEXTS = [
    ({}, "because"),
    ({"fix": "Do it."}, "because. Do it."),
    ({"source": "bytes"}, "cannot convert bytes: because"),
    ({"source": "bytes", "target": "torch"}, "cannot convert bytes to 'torch': because"),
    ({"target": "torch"}, "because"),
    ({"path": (0,)}, "at obj[0]: because"),
    ({"path": (0,), "fix": "Do it."}, "at obj[0]: because. Do it."),
    ({"root": "x"}, "at x: because"),
    ({"root": "x", "path": ("k",)}, "at x['k']: because"),
    ({"details": (("dtypes", "; it has none"),), "fix": "Do it."}, "because; it has none. Do it."),
    ({"option": (("detach", True),)}, "because. Pass detach=True."),
    ({"option": (("detach", True),), "fix": "Do it."}, "because. Pass detach=True. Do it."),
    (
        {"source": "bytes", "target": "torch", "path": ("a", 3)},
        "cannot convert bytes to 'torch' at obj['a'][3]: because",
    ),
    (
        PARTS,
        "cannot convert numpy.ndarray (float32[4], strides=(-1,)) to 'torch' without a copy at obj['a'][3]: "
        "because, found 16. Drop copy=False.",
    ),
]


@pytest.mark.parametrize(("parts", "text"), TEXTS, ids=lambda value: value if isinstance(value, str) else "")
@every
def test_the_message(name, parts, text):
    """The message has one format: the call, the object, the target, the path, the reason and the fix."""
    kind = getattr(errors, name)
    text = text.replace("cannot convert", f"cannot {kind.action}")
    if kind.action == "read":  # has no target
        text = text.replace(" to 'torch'", "")
    if not (parts.get("fix") or parts.get("option")):
        text = errors.sentences(text, kind.usual_fix)
    assert str(kind("because", **parts)) == text


def test_the_message_of_a_conversion(np, torch):
    """The message of a real error has exactly the documented format."""
    with pytest.raises(errors.CopyRequiredError) as caught:
        dlx.convert(np.arange(4, dtype="float32")[::-1], to="torch", copy=False)
    assert re.fullmatch(
        r"cannot convert numpy\.ndarray \(float32\[4\], strides=\(-1,\)\) to 'torch' without a copy: "
        r"torch tensors cannot have negative strides, found \(-1,\) in elements\. Drop copy=False\.",
        str(caught.value),
    )
    found = {part: getattr(caught.value, part) for part in PARTS}
    assert found == PARTS | {"path": (), "details": ()} and caught.value.where == ""
    assert caught.value.fix == "Drop copy=False."
    assert caught.value.reason == "torch tensors cannot have negative strides, found (-1,) in elements"


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (b"abc", {"to": "numpy", "device": "cuda"}),
        (b"abc", {"to": "dlx", "device": "metal:1"}),
        (b"abc", {"to": "dlx", "stream": 7}),
        ("text", {"to": "dlx"}),
        (1, {"to": "dlx"}),
    ],
    ids=str,
)
def test_every_refusal_says_what_and_how(np, source, options):
    """An error names the object's type and the target, and has a fix; nothing is repeated."""
    with pytest.raises(errors.DlxError) as caught:
        dlx.convert(source, **options)
    text = str(caught.value)
    assert text.startswith(f"cannot convert {type(source).__name__} ") and f" to '{options['to']}': " in text
    assert caught.value.fix.endswith(".") and text.endswith(caught.value.fix) and ".." not in text
    assert not caught.value.reason.endswith(".")


@every
def test_attributes(name):
    """The parts of the message are attributes, empty if unknown."""
    kind = getattr(errors, name)
    error = kind("because", **PARTS)
    assert {part: getattr(error, part) for part in PARTS} == PARTS
    assert {part: getattr(error, part) for part in SAID} == SAID
    assert not any(getattr(kind("because"), part) for part in PARTS) and kind("because").where == ""
    assert error.args == ("because",)
    with pytest.raises(AttributeError):
        error.where = "obj[1]"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@every
def test_pickling(name, protocol):
    """An error survives pickling with its class, parts and message."""
    error = getattr(errors, name)("because", **PARTS)
    back = pickle.loads(pickle.dumps(error, protocol))
    assert (type(back), str(back), back.args, vars(back)) == (type(error), str(error), error.args, vars(error))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@every
def test_copying(name, copied):
    """An error can be copied with all its parts."""
    error = getattr(errors, name)("because", **PARTS)
    back = copied(error)
    assert back is not error and type(back) is type(error) and vars(back) == vars(error)


def test_notes_survive_pickling():
    """What add_note added to an error is kept."""
    error = errors.LayoutError("because")
    error.add_note("seen in the loader")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["seen in the loader"]


def test_subclasses_pickle():
    """An adapter's subclass pickles as itself."""
    back = pickle.loads(pickle.dumps(Special("because", fix="Do it.", path=(errors.Attribute("x"),))))
    assert type(back) is Special and back.fix == "Do it." and back.where == "obj.x"


class Special(errors.LayoutError):
    """An error of an adapter."""


def test_complete_fills_only_what_is_empty():
    """An outer layer fills in missing parts and overwrites nothing."""
    error = errors.LayoutError("because", source="inner")
    assert error.complete(source="outer", target="torch") is error
    assert (error.source, error.target) == ("inner", "torch")


def test_complete_replaces_the_usual_fix():
    """An outer layer's fix is more precise; an option is one, too."""
    assert errors.FileError("because").complete(fix="Do it.").fix == "Do it."
    assert errors.FileError("because", option=(("copy", None),)).complete(fix="Do it.").fix == "Drop copy=False."


def test_a_path_and_its_root_are_completed_together():
    """An error that already has a path, e.g. of a conversion inside a producer, keeps it."""
    error = errors.LayoutError("because", path=("k",))
    assert error.complete(path=(1,), root="arrays").where == "obj['k']"
    assert errors.LayoutError("because", root="x").complete(path=(1,)).where == "x"
    assert errors.LayoutError("because").complete(path=(1,), root="arrays").where == "arrays[1]"


# ---- paths -----------------------------------------------------------------------------------------------------------


class Odd:
    """A key without a useful repr that does not pickle."""

    def __repr__(self):
        raise ValueError

    def __reduce__(self):
        raise TypeError


class Named(str):
    """A key of a custom class."""


PATHS = [
    (("a", 3, errors.Attribute("x"), errors.Member(2)), "obj['a'][3].x{2}"),
    ((b"k", 1.5, True, None, ("t", (1,))), "obj[b'k'][1.5][True][None][('t', (1,))]"),
    (("obj", "]", "'"), "obj['obj'][']'][\"'\"]"),
    (("k" * 500,), f"obj['{'k' * 59}...{'k' * 14}']"),
]


@pytest.mark.parametrize(("path", "text"), PATHS, ids=["kinds", "data", "quotes", "long"])
def test_a_path_is_data_and_reads_as_python(path, text):
    """Keys keep their values; the text is created from them, and only the text truncates long keys."""
    error = errors.LayoutError("because", path=path)
    assert (error.path, error.where) == (path, text)
    back = pickle.loads(pickle.dumps(error))
    assert back.path == path and list(map(type, back.path)) == list(map(type, path))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (Odd(), "<Odd>"),
        (Named("n"), "'n'"),
        (errors.DlxError, "<class 'dlx.errors.DlxError'>"),
        ("k" * 5000, f"'{'k' * 59}...0 more characters)".replace("0 more", "more")),
        (10**5000, "<int>"),
        ((Odd(),), "<tuple>"),
    ],
    ids=["no repr", "subclass", "object", "very long", "huge", "tuple"],
)
def test_a_key_that_is_more_than_plain_data_is_kept_as_its_text(key, text):
    """An error always pickles, and keeps no key alive."""
    error = errors.LayoutError("because", path=("a", key))
    back = pickle.loads(pickle.dumps(error))
    assert error.path[1] is not key and isinstance(error.path[1], str) and len(error.path[1]) < 1100
    assert back.where == error.where and back.path == error.path
    if len(text) < 40:
        assert error.where == f"obj['a'][{text}]"


def test_a_long_path_is_read_without_its_middle():
    """The data is complete."""
    error = errors.LayoutError("because", path=range(1000))
    assert len(error.path) == 1000
    assert error.where.count("[") == 64 and error.where.startswith("obj[0][1]") and "[31] ... [968]" in error.where


# ---- options ---------------------------------------------------------------------------------------------------------

OPTIONS = [
    ((("copy", None),), "Drop copy=False.", "Drop --copy never."),
    ((("detach", True),), "Pass detach=True.", "Pass --detach."),
    (
        (("copy", None), ("readonly", "share")),
        "Drop copy=False, or pass readonly='share'.",
        "Drop --copy never, or pass --readonly share.",
    ),
    (
        (("readonly", "copy"), ("readonly", "share")),
        "Pass readonly='copy' or readonly='share'.",
        "Pass --readonly copy or --readonly share.",
    ),
    ((("strict", None),), "Drop strict=True.", "Drop --strict."),
    ((("device", None),), "Leave device out.", "Leave --device out."),
    (
        (("device", "cpu"), ("to", "dlx")),
        "Pass device='cpu' or to='dlx'.",
        "Pass --device cpu or --to dlx.",
    ),
    ((), "", ""),
]


@pytest.mark.parametrize(
    ("option", "python", "command"), OPTIONS, ids=lambda value: value if value and isinstance(value, str) else ""
)
def test_options_are_said_as_who_speaks_has_them(option, python, command):
    """One sentence lists the alternatives, in Python or command-line syntax."""
    error = errors.ConversionError("because", option=option)
    assert (error.fix, error.advice(command_option)) == (python, command)


def test_a_call_without_the_option_says_which_call_has_it():
    """Only options for another function name that function."""
    error = errors.ConversionError("because", option=(("detach", True),), via="to dlx.convert(obj)", fix="Or not.")
    assert error.fix == "Pass detach=True to dlx.convert(obj). Or not."
    assert (
        errors.ConversionError("because", option=(("copy", None),), via="to dlx.convert(obj)").fix == "Drop copy=False."
    )


TEXTS_OF_ERRORS = {"fix", "where", "reason", "brief", "args"}
EDITS = {"startswith", "removeprefix", "removesuffix", "replace", "partition", "rpartition", "split", "strip", "rstrip"}


def is_said(node, names=()):
    """Return whether an expression is an error's text: an attribute, the message, or a name for one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        errs = {each.id for each in node.args if isinstance(each, ast.Name)}
        said = node.func.id in ("message_of", "exception_text")
        return said or (node.func.id in ("str", "repr") and bool({"error", "cause", "failure", "raised"} & errs))
    if isinstance(node, ast.Name):
        return node.id in names
    return isinstance(node, ast.Attribute) and node.attr in TEXTS_OF_ERRORS


def edits(function):
    """Yield the edits of error texts in a function."""
    every = list(ast.walk(function))
    names = {
        target.id
        for node in every
        if isinstance(node, ast.Assign) and is_said(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in every:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of, name = node.func.value, node.func.attr
            lines = name == "split" and not node.args  # all on one line
            if name in EDITS and is_said(of, names) and not lines:
                yield ast.unparse(node)
            pattern = isinstance(of, ast.Name) and (of.id == "re" or of.id.strip("_").isupper())
            if pattern and any(is_said(each, names) for each in node.args):
                yield ast.unparse(node)
        if isinstance(node, ast.Subscript) and is_said(node.value, names):
            yield ast.unparse(node)


@pytest.mark.parametrize("path", sorted((ROOT / "dlx").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_edits_the_text_of_an_error(path):
    """No code edits error texts by prefixes, slices or regular expressions: use attributes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name != "find_in":  # for errors of other libraries
            assert list(edits(node)) == [], f"{path.name}: {node.name}"


@pytest.mark.parametrize(
    "code",
    [
        "error.fix.startswith('Pass ')",
        "error.where.removeprefix('obj')",
        "_OPTION.sub(said, found.fix)",
        "re.search('x', str(error))",
        "error.reason[3:]",
        "text = message_of(error); text.partition('x')",
    ],
)
def test_edits_of_error_texts_are_found(code):
    """The test above detects earlier code of dlx."""
    assert list(edits(ast.parse(f"def function(): {code}")))


@pytest.mark.parametrize("name", ["DlxError", "ConversionError"])
def test_catching_the_family(name):
    """One except clause catches every failed conversion."""
    with pytest.raises(getattr(errors, name)):
        dlx.convert(b"abc", to="dlx", device="cuda")


# ---- statuses of the C core ------------------------------------------------------------------------------------------

HEADER = ROOT / "c_src" / "include" / "dlx.h"
STATUSES = dict(re.findall(r"\b(DLX_E_\w+) = (-\d+)", HEADER.read_text()))


def test_every_status_has_a_class():
    """Every status of the C core except MEMORY has a class in dlx.errors, and every class has a current status."""
    assert len(STATUSES) > 10
    assert set(native._CLASSES) == STATUSES.keys() - {"DLX_E_MEMORY"}
    assert all(issubclass(kind, errors.ConversionError) for kind in native._CLASSES.values())


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_has_a_sentence(status):
    """Every status has a unique number and a text that can be a reason."""
    number = getattr(native.lib, status)
    text = native.ffi.string(native.lib.dlx_status_text(number)).decode()
    assert number == int(STATUSES[status]) and list(STATUSES.values()).count(STATUSES[status]) == 1
    assert text not in ("unknown status", "fine") and not text.endswith(".") and text[0].islower()


def test_a_status_raises_its_class(counting):
    """The C core raises the class that is registered for a status."""
    with pytest.raises(errors.LayoutError) as caught:
        native.capsule_peek(counting.capsule((3,), null_data=True))
    assert caught.value.reason == native.ffi.string(native.lib.dlx_status_text(native.lib.DLX_E_NULL)).decode()
