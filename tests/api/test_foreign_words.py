"""Messages of producers and adapters reach the user unchanged."""

from __future__ import annotations

import contextlib
import json

import pytest

import dlx
from dlx import errors
from dlx.adapter import Blocker, Description
from dlx.cli import main

SAYS = "Pass it through mylib.unseal() first."
OPTION = "it was made with copy=True and detach=True, device='cpu'"


class Sealed:
    """A producer that raises."""

    def __init__(self, error):
        self.error = error

    def __dlpack__(self, **keywords):
        raise self.error

    def __dlpack_device__(self):
        return (1, 0)


def borrowed(obj):
    """Borrow an array."""
    with dlx.borrow(obj):
        pass


CALLS = {
    "convert": lambda obj: dlx.convert(obj, to="dlx"),
    "lazy": lambda obj: dlx.convert({"obj": [obj]}, to="dlx", lazy=True)["obj"][0],
    "from_dlpack": dlx.from_dlpack,
    "to_capsule": dlx.to_capsule,
    "borrow": borrowed,
    "stack": lambda obj: dlx.stack([obj], "dlx"),
    "using": lambda obj: dlx.using("dlx")(lambda x: x)(obj),
    "shares_memory": lambda obj: dlx.shares_memory(obj, b"abc"),
}
every = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@every
@pytest.mark.parametrize("kind", [errors.ConversionError, errors.CopyRequiredError])
def test_the_fix_of_a_producers_own_error_arrives_unchanged(call, kind):
    """Text that looks like an option of dlx is not rewritten."""
    with pytest.raises(kind) as caught:
        call(Sealed(kind("it is sealed", fix=SAYS)))
    assert caught.value.fix == SAYS and str(caught.value).endswith(f"it is sealed. {SAYS}")


@every
@pytest.mark.parametrize("option", [(), (("detach", True),)], ids=["", "with an option"])
def test_the_fix_of_a_blocker_arrives_unchanged(call, option, monkeypatch):
    """The adapter's sentence follows the sentence about dlx's options."""
    blocker = Blocker("it is sealed", SAYS, needs="detach" if option else None, resolution="x" if option else None)
    adapter = type(dlx._registry.generic.DLPACK)
    monkeypatch.setattr(adapter, "describe", lambda self, obj: Description(blockers=(blocker,)))
    called = dlx.using("dlx", detach=False)(lambda x: x) if call is CALLS["using"] else call
    with pytest.raises(errors.LayoutError) as caught:
        called(Sealed(None))
    assert caught.value.option == option
    assert (caught.value.fix == SAYS) is not bool(option) and caught.value.fix.endswith(SAYS)
    assert str(caught.value).endswith(caught.value.fix)


@every
def test_the_message_of_a_producer_arrives_unchanged(call):
    """It is unchanged up to its full stop, whatever it contains."""
    with pytest.raises(errors.ConversionError) as caught:
        call(Sealed(ValueError(SAYS)))
    assert str(caught.value).endswith(f"__dlpack__ raised ValueError: {SAYS}")


@pytest.mark.parametrize("error", [ValueError(OPTION), errors.ConversionError("no", fix=f"Ask whom {OPTION}.")])
def test_the_command_line_translates_no_text_of_others(error, tmp_path, monkeypatch, capsys):
    """``copy=True`` in a producer's text is not translated to ``--copy always``; dlx's option is."""
    (tmp_path / "sealed_module.py").write_text("held = []")
    monkeypatch.syspath_prepend(tmp_path)
    import sealed_module

    sealed_module.held += [Sealed(error), Sealed(error)]
    sealed_module.one = Sealed(error)
    for name in ("sealed_module:held", "sealed_module:one"):
        assert main(["plan", name, "--to", "dlx", "--copy", "always"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert OPTION in shown and "--copy always and" not in shown and "--detach" not in shown
        assert main(["plan", name, "--to", "dlx", "--json"]) == 0
        assert OPTION in json.dumps(json.loads(capsys.readouterr().out))


class Own:
    """A container with its own protocol, which a lazy view converts as a whole."""

    def __init__(self, child, error=None):
        self.child, self.error = child, error

    def __dlx_tree__(self):
        if self.error is not None:
            raise self.error
        return {"obj": self.child}, lambda children: Own(children["obj"])


def test_a_lazy_view_names_places_by_keys_and_not_by_text(np):
    """Keys and names that look like the root are unchanged; an error with a path keeps it."""
    bad = np.array(["x"])
    for make, path in (
        (lambda: {"obj": Own(bad)}, ("obj", "obj")),
        (lambda: {"object['obj']": [Own({"obj]": bad})]}, ("object['obj']", 0, "obj", "obj]")),
    ):
        view = dlx.convert(make(), to="dlx", lazy=True)
        with pytest.raises(errors.DTypeError) as caught:
            inner = view
            for key in path:
                inner = inner[key]
        assert caught.value.path == path
    view = dlx.convert({"k": Own(bad, errors.LayoutError("no", root="object", path=("field",)))}, to="dlx", lazy=True)
    with pytest.raises(errors.LayoutError, match=r"at object\['field'\]: no"):
        _ = view["k"]


def test_a_lazy_view_that_collects_names_the_whole_path(np):
    """Errors in a group have the whole path, too."""
    view = dlx.convert({"k": Own(np.array(["x"]))}, to="dlx", lazy=True, errors="collect")
    with pytest.raises(ExceptionGroup) as group:
        _ = view["k"]
    assert [error.where for error in group.value.exceptions] == ["obj['k']['obj']"]


def test_arguments_are_named_by_their_keys(np):
    """A name of an option may hold any character."""
    take = dlx.using("dlx")(lambda *rest, **named: None)
    bad = np.array(["x"])
    for args, options, path, where in (
        ((), {"a]b": bad}, (), "a]b"),
        ((), {"k": {"]": [bad]}}, ("]", 0), "k[']'][0]"),
        ((1, {"]": bad}), {}, (1, "]"), "rest[1][']']"),
    ):
        with pytest.raises(errors.DTypeError) as caught:
            take(*args, **options)
        assert (caught.value.path, caught.value.where) == (path, where)


def test_what_is_sent_to_a_generator_has_a_place_of_its_own(np):
    """A sent value is not called an argument."""

    @dlx.using("dlx")
    def steps():
        while True:
            yield

    for sent, where in ((np.array(["x"]), ""), ([np.array(["x"])], "obj[0]")):
        running = steps()
        next(running)
        with pytest.raises(errors.DTypeError) as caught:
            running.send(sent)
        assert caught.value.where == where
        with contextlib.suppress(StopIteration):
            running.close()


@pytest.mark.parametrize(
    ("call", "end"),
    [
        ("convert", "Pass detach=True."),
        ("lazy", "Pass detach=True."),
        ("from_dlpack", "Pass detach=True to dlx.convert(x, to=...) first."),
        ("to_capsule", "Pass detach=True to dlx.convert(x, to=...) first."),
        ("borrow", "Pass detach=True to dlx.convert(x, to=...) first."),
        ("stack", "Pass detach=True to dlx.convert(array, to='dlx') and stack its result."),
    ],
)
def test_each_call_says_where_its_option_is(torch, call, end):
    """The option's name is in the error's data and in the sentence."""
    with pytest.raises(errors.ConversionError) as caught:
        CALLS[call](torch.ones(2, requires_grad=True))
    assert caught.value.option == (("detach", True),) and caught.value.fix == end
