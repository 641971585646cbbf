"""The error family: classes that callers already catch, one message, parts that programs can read."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from pathlib import Path

import pytest

import dlx
from dlx import errors
from dlx._core import native

FAMILY = {  # class: direct base in the family, builtin that it also is
    "DlxError": (Exception, Exception),
    "ConversionError": (errors.DlxError, BufferError),
    "CopyRequiredError": (errors.ConversionError, ValueError),
    "ReadOnlyError": (errors.ConversionError, ValueError),
    "LayoutError": (errors.ConversionError, ValueError),
    "DTypeError": (errors.ConversionError, TypeError),
    "DeviceError": (errors.ConversionError, RuntimeError),
    "StreamError": (errors.ConversionError, ValueError),
    "ProtocolError": (errors.ConversionError, ValueError),
    "ConsumedError": (errors.ProtocolError, ValueError),
    "AdapterNotFoundError": (errors.DlxError, TypeError),
    "FrameworkNotInstalledError": (errors.DlxError, ImportError),
    "PluginError": (errors.DlxError, RuntimeError),
}
PARTS = {
    "source": "numpy.ndarray (float32[4], strides=(-1,))",
    "target": "torch",
    "where": "obj['a'][3]",
    "fix": "Drop copy=False.",
    "sharing": True,
}
every = pytest.mark.parametrize("name", FAMILY)


def test_the_family_is_complete():
    """Every public class of dlx.errors is listed here, and no other."""
    assert sorted(errors.__all__) == sorted(FAMILY)
    defined = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert defined == set(FAMILY)


@every
def test_bases(name):
    """Each class has its place in the family and is also the builtin that callers already catch."""
    kind, (base, builtin) = getattr(errors, name), FAMILY[name]
    assert kind.__bases__[0] is base and issubclass(kind, builtin) and issubclass(kind, errors.DlxError)


@every
def test_conversion_errors_are_buffer_errors(name):
    """What says that data cannot cross is a BufferError, the array API standard's word; nothing else is."""
    kind = getattr(errors, name)
    assert issubclass(kind, BufferError) == issubclass(kind, errors.ConversionError)


@every
def test_documented(name):
    """Each class says in one line when it is raised."""
    assert inspect.getdoc(getattr(errors, name)).splitlines()[0].endswith(".")


TEXTS = [
    ({}, "because"),
    ({"fix": "Do it."}, "because. Do it."),
    ({"source": "bytes"}, "cannot convert bytes: because"),
    ({"source": "bytes", "target": "torch"}, "cannot convert bytes to 'torch': because"),
    ({"target": "torch"}, "because"),
    ({"where": "obj[0]"}, "at obj[0]: because"),
    ({"where": "obj[0]", "fix": "Do it."}, "at obj[0]: because. Do it."),
    (
        {"source": "bytes", "target": "torch", "where": "obj['a'][3]"},
        "cannot convert bytes to 'torch' at obj['a'][3]: because",
    ),
    (
        PARTS,
        "cannot convert numpy.ndarray (float32[4], strides=(-1,)) to 'torch' without a copy at obj['a'][3]: "
        "because. Drop copy=False.",
    ),
]


@pytest.mark.parametrize(("parts", "text"), TEXTS, ids=lambda value: value if isinstance(value, str) else "")
@every
def test_the_message(name, parts, text):
    """The message has one template: what was found and asked, where, why, and the fix."""
    assert str(getattr(errors, name)("because", **parts)) == text


def test_the_message_of_a_conversion(np, torch):
    """A real refusal reads exactly as designed."""
    with pytest.raises(errors.CopyRequiredError) as caught:
        dlx.convert(np.arange(4, dtype="float32")[::-1], to="torch", copy=False)
    assert re.fullmatch(
        r"cannot convert numpy\.ndarray \(float32\[4\], strides=\(-1,\)\) to 'torch' without a copy: "
        r"torch tensors cannot have negative strides, found \(-1,\) in elements\. Drop copy=False\.",
        str(caught.value),
    )
    found = {part: getattr(caught.value, part) for part in PARTS}
    assert found == PARTS | {"where": ""}
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
    """A refusal names the type that was found and the target that was asked for, and has a fix; nothing is doubled."""
    with pytest.raises(errors.DlxError) as caught:
        dlx.convert(source, **options)
    text = str(caught.value)
    assert text.startswith(f"cannot convert {type(source).__name__} ") and f" to '{options['to']}': " in text
    assert caught.value.fix.endswith(".") and text.endswith(caught.value.fix) and ".." not in text
    assert not caught.value.reason.endswith(".")


@every
def test_attributes(name):
    """The parts of the message are attributes, empty where nothing is known."""
    kind = getattr(errors, name)
    error = kind("because", **PARTS)
    assert error.reason == "because" and {part: getattr(error, part) for part in PARTS} == PARTS
    assert [getattr(kind("because"), part) for part in PARTS] == ["", "", "", "", False]
    assert error.args == ("because",)


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
    """An adapter's own subclass of ours pickles as itself."""
    back = pickle.loads(pickle.dumps(Special("because", fix="Do it.")))
    assert type(back) is Special and back.fix == "Do it."


class Special(errors.LayoutError):
    """An error of an adapter."""


def test_complete_fills_only_what_is_empty():
    """An outer layer adds what it knows, and overwrites nothing."""
    error = errors.LayoutError("because", source="inner")
    assert error.complete(source="outer", target="torch") is error
    assert (error.source, error.target) == ("inner", "torch")


@pytest.mark.parametrize("name", ["DlxError", "ConversionError"])
def test_catching_the_family(name):
    """One except clause catches every refusal of a conversion."""
    with pytest.raises(getattr(errors, name)):
        dlx.convert(b"abc", to="dlx", device="cuda")


# ---- statuses of the C core ------------------------------------------------------------------------------------------

HEADER = Path(__file__).resolve().parent.parent.parent / "c_src" / "include" / "dlx.h"
STATUSES = dict(re.findall(r"\b(DLX_E_\w+) = (-\d+)", HEADER.read_text()))


def test_every_status_has_a_class():
    """Every status of the C core but MEMORY is raised as a class of dlx.errors, and no class is for a status of old."""
    assert len(STATUSES) > 10
    assert set(native._CLASSES) == STATUSES.keys() - {"DLX_E_MEMORY"}
    assert all(issubclass(kind, errors.ConversionError) for kind in native._CLASSES.values())


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_has_a_sentence(status):
    """Every status has a number of its own and a sentence that can be a reason."""
    number = getattr(native.lib, status)
    text = native.ffi.string(native.lib.dlx_status_text(number)).decode()
    assert number == int(STATUSES[status]) and list(STATUSES.values()).count(STATUSES[status]) == 1
    assert text not in ("unknown status", "fine") and not text.endswith(".") and text[0].islower()


def test_a_status_raises_its_class(counting):
    """The class registered for a status is what the C core raises."""
    with pytest.raises(errors.LayoutError) as caught:
        native.capsule_peek(counting.capsule((3,), null_data=True))
    assert caught.value.reason == native.ffi.string(native.lib.dlx_status_text(native.lib.DLX_E_NULL)).decode()
