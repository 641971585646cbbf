"""How plans, descriptions, adapters, devices, dtypes and views show themselves."""

import gc
import html.parser
import pickle
import re
import warnings
import weakref

import pytest

import dlx
from dlx._support.display import COLORS
from dlx.adapter import Adapter
from dlx.errors import ConversionError, DlxError


class Table(html.parser.HTMLParser):
    """Parse the rows of an HTML table; fail for unclosed or unexpected tags."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.rows, self.styles, self.text = [], [], {}, ""
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        assert tag in {"table", "tr", "th", "td", "div", "span", "pre"}, tag
        assert set(dict(attrs)) <= {"style"}
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "span":
            self.style = dict(attrs)["style"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data
        if "span" in self.open:
            self.styles[data] = self.style


class Text:
    """It has text, which DLPack has no dtype for."""

    @property
    def __array_interface__(self):
        return {"shape": (2,), "typestr": "<U3", "data": b"abcdef" * 4, "version": 3}


def tree():
    """Return a tree with one array of each outcome, and something that passes through."""
    return {"a": bytearray(8), "b": memoryview(bytes(8))[::2], "c": Text(), "n": 3}


def shown():
    """Return one of each object that shows itself, by name."""
    return {
        "plan": dlx.plan(b"abc", to="dlx"),
        "refusal": dlx.plan(Text(), to="dlx"),
        "tree": dlx.plan([dlx.convert(b"abc", to="dlx")], to="dlx"),
        "description": dlx.describe(b"abc"),
        "device": dlx.Device("cuda:1"),
        "dtype": dlx.DType("float32"),
        "adapters": dlx.adapters(),
        "view": dlx.convert({"a": dlx.convert(b"abc", to="dlx")}, to="dlx", lazy=True),
        "trace": dlx.trace(),
    }


class Printer:
    """The one method of IPython's pretty printer that is called."""

    def __init__(self):
        self.said = ""

    def text(self, text):
        self.said += text


@pytest.mark.parametrize("name", [*shown()])
def test_objects_show_themselves(name):
    """The repr is short and has no address; IPython's prompt shows it, and HTML is well formed."""
    obj = shown()[name]
    assert not re.search(r"0x[0-9a-f]{6}|object at", repr(obj))
    assert max(map(len, repr(obj).splitlines())) < 260
    printer = Printer()
    obj._repr_pretty_(printer, False)
    assert printer.said == repr(obj)
    drawn = Table(obj._repr_html_())
    assert drawn.text and all(any(row) for row in drawn.rows), "no row is empty"
    assert list(obj.__rich_repr__()) or name == "plan"


def test_an_adapter_shows_its_name(np):
    """It also shows its class, without an address, even if its author forgot the name."""
    assert repr(dlx.adapters()["numpy"]) == "<dlx_adapters.dlx_numpy.NumpyAdapter 'numpy'>"
    assert repr(Adapter()) == "<dlx.adapter.Adapter ''>"


def test_a_plan_of_a_tree_is_a_table():
    """The table has one line for each array, and lists objects that pass through."""
    held = [dlx.convert(b"abc", to="dlx"), dlx.convert(bytes(3), to="dlx", copy=True), 3]
    made = dlx.plan({"a": held[0], "b": held[1], "n": held[2]}, to="arrow")
    head, *lines = repr(made).splitlines()
    assert head.startswith("<dlx.Plan tree of 2 arrays -> arrow: ") and head.endswith(">")
    assert [line.split()[0] for line in lines] == ["obj['a']", "obj['b']", "passes"]
    assert len(repr(made)) < 300


def test_a_long_plan_is_cut_with_counts(np):
    """Refused and copied arrays come first."""
    array, odd = np.ones(4), np.array(["abc"])
    arrays = [array[i % 3 : i % 3 + 1] for i in range(10_000)]
    distinct = [array[:1].copy() for _ in arrays]
    made = dlx.plan([*distinct, odd], to="dlx")
    lines = repr(made).splitlines()
    assert len(lines) < 16
    assert "10,001 arrays" in lines[0] and "10,000 shared" in lines[0] and "1 refused" in lines[0]
    assert any("refused" in line and "obj[10000]" in line for line in lines[1:])
    assert "and 9,991 more: 9,991 shared" in lines[-1]
    assert len(made._repr_html_()) < 40_000
    assert len(str(made).splitlines()) > 10_000, "print(plan) shows all"


def test_outcomes_have_the_colours_of_the_pictures(np, torch):
    """Each has a background, since a notebook may be light or dark."""
    root = [np.ones(3), np.ones(3)[::-1], torch.ones(3), np.array(["abc"])]
    table = Table(dlx.plan(root, to="torch")._repr_html_())
    assert [row[2] for row in table.rows] == ["outcome", "shared", "copied", "same", "refused"]
    for word, style in table.styles.items():
        assert COLORS[word][0] in style and "background:" in style and "color:" in style
    pictures = __import__("dlx.cli.commands.dtypes", fromlist=["_FILLS"])._FILLS
    assert {word: pictures[word] for word in ("shared", "copied", "same")} == {
        word: COLORS[word] for word in ("shared", "copied", "same")
    }
    assert all(color in fill for color, fill in zip(COLORS["refused"], pictures["refused"], strict=True))


def test_everything_foreign_is_escaped():
    """Keys, class names and dtypes are written by others."""
    evil = "<script>alert('&\"')</script>\x1b[31m\n"
    kind = type("<b>evil</b>", (Text,), {})
    made = dlx.plan({evil: kind(), "fine": bytearray(2)}, to="dlx")
    for text in (made._repr_html_(), dlx.describe(memoryview(b"ab"))._repr_html_()):
        assert "<script" not in text and "<b>" not in text and "\x1b" not in text
    assert "evil" in Table(made._repr_html_()).text
    assert "\x1b" not in repr(made)


def test_rich_and_ipython_are_not_imported(python):
    """Neither dlx nor the display of its objects imports them."""
    python("""
        import sys, dlx
        for shown in (dlx.plan([b"abc"], to="dlx"), dlx.describe(b"abc"), dlx.adapters(), dlx.Device("cpu")):
            repr(shown), shown._repr_html_(), list(shown.__rich_repr__())
        assert not {"rich", "IPython"} & sys.modules.keys()
    """)


def test_rich_prints_them():
    """A device is not printed as a tuple of numbers."""
    console = pytest.importorskip("rich.console").Console(width=200, no_color=True, force_terminal=False)
    with console.capture() as said:
        for obj in shown().values():
            console.print(obj)
    assert "Device('cuda:1')" in said.get() and "DType('float32')" in said.get()
    assert "object at" not in said.get()


# ---- bool, ok and run ------------------------------------------------------------------------------------------------


def test_a_plan_is_false_where_it_is_refused():
    """Refused plans of arrays, trees and other objects are false."""
    assert dlx.plan(b"abc", to="dlx") and dlx.plan(b"abc", to="dlx").ok
    for refused in (dlx.plan(Text(), to="dlx"), dlx.plan([Text()], to="dlx"), dlx.plan(object(), to="dlx")):
        assert not refused and not refused.ok


def test_a_plan_is_run():
    """It runs with the same arguments on the same object."""
    source = bytearray(b"abc")
    assert dlx.shares_memory(dlx.plan(source, to="dlx").run(), source)
    assert not dlx.shares_memory(dlx.plan(source, to="dlx", copy=True).run(), source)
    tensor = dlx.convert(source, to="dlx")
    assert dlx.plan(tensor, like=tensor).run() is tensor
    assert dlx.plan({"a": tensor}, to="dlx").run()["a"] is tensor
    assert "lazy" in repr(dlx.plan({"a": tensor}, to="dlx", lazy=True).run())


@pytest.mark.parametrize("options", [{}, {"errors": "collect"}], ids=["raise", "collect"])
def test_a_refused_plan_raises_its_error(options):
    """Every run raises it, and the plan keeps no frames."""
    made = dlx.plan([Text(), Text()], to="dlx", **options)
    for _ in range(2):
        with pytest.raises(type(made.error)) as caught:
            made.run()
        assert str(caught.value) == str(made.error)
    assert made.error.__traceback__ is None


def test_a_plan_of_what_has_changed_is_not_run(np):
    """A changed layout, another array or an additional array is an error; values may change."""
    array = np.zeros((2, 3))
    root = [array]
    one, several = dlx.plan(array, to="dlx", copy=False), dlx.plan(root, to="dlx")
    array[:] = 1
    assert one.run().shape == (2, 3) and several.run()[0].shape == (2, 3)
    root.append(np.zeros(1))
    with pytest.raises(ConversionError, match=r"has changed.*2 arrays.*Plan again"):
        several.run()
    array.flags.writeable = False
    made = dlx.plan(array, to="dlx", readonly="error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from numpy 2.5 on
        array.dtype = np.dtype("S8")
    with pytest.raises(ConversionError, match="has changed"):
        made.run()


def test_a_plan_refers_weakly(np):
    """It refers weakly to the source and `like`; if one was deleted, the error names it."""
    array, like = np.ones(2), np.ones(3)
    made, alive = dlx.plan(array, like=like), weakref.ref(like)
    del like
    gc.collect()
    assert alive() is None
    with pytest.raises(ConversionError, match="passed as like= no longer exists"):
        made.run()
    made = dlx.plan(np.ones(2), to="dlx")
    with pytest.raises(ConversionError, match="the planned object no longer exists"):
        made.run()


def test_copies_and_parts_of_plans_cannot_be_run():
    """They know no source."""
    made = dlx.plan([dlx.convert(b"abc", to="dlx")], to="dlx")
    for other in (pickle.loads(pickle.dumps(made)), made._replace(path="x"), made.leaves[0]):
        assert other
        with pytest.raises(TypeError, match=r"dlx\.plan returned"):
            other.run()
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_plan_with_a_wrong_target_is_refused():
    """It raises when it is run, as `convert` does."""
    with pytest.raises(DlxError, match="nunpy"):
        dlx.plan(b"abc", to="nunpy").run()
