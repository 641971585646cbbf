"""help(), notebooks and editors show public functions as functions, with docstring and annotations."""

import ast
import importlib
import inspect
import pathlib
import pydoc
import subprocess
import sys
import textwrap
import typing

import pytest

import dlx
import dlx.adapter

FUNCTIONS = [name for name in dlx.__all__ if getattr(getattr(dlx, name), "__module__", "") == "dlx"]
FUNCTIONS = [name for name in FUNCTIONS if not isinstance(getattr(dlx, name), type)]
BUILD = {"cffi_builder", "get_include"}  # of a module that a build runs without dlx: their results are in quotes


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_shows_a_function_and_its_docstring(name):
    """help() does not show its C type; annotations have no quotes."""
    function = getattr(dlx, name)
    text = pydoc.render_doc(function, renderer=pydoc.plaintext)
    head, signature = text.splitlines()[0], text.splitlines()[2]
    # From Python 3.13 on a callable of C that can be a method is one of these to pydoc.
    assert head.startswith(
        ("Python Library Documentation: function ", "Python Library Documentation: method descriptor ")
    )
    assert signature.startswith(f"{name}(")
    assert name in BUILD or (": '" not in signature and "-> '" not in signature)
    assert inspect.getdoc(function).splitlines()[0] in text
    assert repr(function).startswith("<function ")


@pytest.mark.parametrize("name", ["Plan", "ArrayInfo", "Device", "DType", "Trace"])
def test_signatures_of_classes_have_no_quotes(name):
    """Those of methods neither."""
    kind = getattr(dlx, name)
    for function in (kind, *(each for each in vars(kind).values() if inspect.isfunction(each))):
        signature = str(inspect.signature(function))
        assert ": '" not in signature and "-> '" not in signature and "ForwardRef" not in signature


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (dlx.adapter.consumed, "(capsule, tensor=None, /)"),
        (dlx.adapter.arrow_exchange, "(by_dlpack=False, /)"),
        (dlx.adapter.buffer_exchange, "()"),
        (dlx.adapter.ArrowSource.joined, "(obj, /)"),
    ],
)
def test_public_builtins_have_a_signature(function, signature):
    """Their documentation in C begins with it, and the text that follows is without it."""
    assert str(inspect.signature(function)) == signature
    assert inspect.getdoc(function).startswith(("Return ", "Take ", "Copy "))


def test_annotations_are_evaluated_as_before():
    """They are texts still, which `typing.get_type_hints` reads."""
    assert typing.get_type_hints(dlx.describe)["return"] is dlx.ArrayInfo
    assert all(isinstance(each, str) for each in dlx.convert.__annotations__.values())


def test_editors_find_docstrings_beside_the_stub():
    """They show the function's docstring: the stub has none, and the module has the names."""
    module = importlib.import_module("dlx._api.signatures")
    body = ast.parse(pathlib.Path(module.__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    named = [each.target.id for each in body if isinstance(each, ast.AnnAssign) and each.value is None]
    assert sorted(named) == sorted(module.__all__)
    assert all(getattr(module, name) is getattr(dlx, name) for name in named)
    assert [each for each in body[1:] if isinstance(each, ast.Expr)] == []


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["convert", "stack", "open"])
def test_jedi_shows_the_docstring_over_its_name(name):
    """All of it, as an editor does."""
    jedi = pytest.importorskip("jedi")
    (shown,) = jedi.Script(f"import dlx\ndlx.{name}").help(2, 5)
    assert inspect.getdoc(getattr(dlx, name)) in shown.docstring()
    assert name != "convert" or shown.type == "function"


def completed(source, namespace=None):
    """Return jedi's completions at the end of a source, like in an editor or, with names, at a prompt."""
    jedi = pytest.importorskip("jedi")
    asked = jedi.Script(source) if namespace is None else jedi.Interpreter(source, [namespace])
    return {each.name for each in asked.complete()}


@pytest.mark.slow
def test_editors_know_the_result(np):
    """Jedi finds the overload's result by the text that names the target."""
    source = 'import numpy as np\nimport dlx\nx = np.ones(3)\ndlx.convert(x, to="numpy").resh'
    assert "reshape" in completed(source)


def test_consumed_takes_its_default():
    """None is the default in the signature, and means a new tensor."""
    assert dlx.adapter.consumed(dlx.to_capsule(bytearray(2)), None).shape == (2,)


def test_prompts_show_the_signature():
    """Jedi reads it of the living function."""
    jedi = pytest.importorskip("jedi")
    (shown,) = jedi.Interpreter("dlx.convert(", [{"dlx": dlx}]).get_signatures()
    assert shown.to_string().startswith("convert(obj: Any, to: Target | None=None")
    assert "convert" in completed("dlx.conv", {"dlx": dlx})


def test_ipython_shows_a_function():
    """``dlx.convert?`` and a cell show the function."""
    oinspect = pytest.importorskip("IPython.core.oinspect")
    pretty = pytest.importorskip("IPython.lib.pretty")
    said = oinspect.Inspector(theme_name="nocolor").info(dlx.convert, oname="dlx.convert")
    assert said["type_name"] == "function" and said["docstring"].startswith("Convert an array")
    assert said["string_form"] == "<function dlx.convert>" and "'Any'" not in (said["definition"] or "")
    made = dlx.plan([bytearray(2)], to="dlx")
    assert pretty.pretty(made) == repr(made) and pretty.pretty(dlx.Device("cpu")) == "Device('cpu')"


@pytest.mark.parametrize("name", ["convert", "plan", "stack", "open", "describe", "share"])
def test_ipython_shows_one_signature_and_one_docstring(name):
    """It would show those of a callable's class and of its ``__call__`` as well."""
    oinspect = pytest.importorskip("IPython.core.oinspect")
    said = oinspect.Inspector(theme_name="nocolor").info(getattr(dlx, name), oname=f"dlx.{name}")
    assert said["definition"].startswith(f"dlx.{name}(") and said["docstring"]
    assert {key: said[key] for key in ("class_docstring", "call_def", "call_docstring", "init_docstring")} == {
        "class_docstring": None, "call_def": None, "call_docstring": None, "init_docstring": None,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["errors", "adapter", "typing", "testing"])
def test_modules_complete_public_names_only(name):
    """Completion shows no import and no helper of a module."""
    module = importlib.import_module(f"dlx.{name}")
    assert sorted(dir(module)) == sorted(module.__all__)


def test_notebooks_complete_the_keys_of_views(tmp_path):
    """IPython and Jupyter call this method after ``view['``; a dict's keys are completed by themselves."""
    view = dlx.convert({"alpha": bytearray(2), "beta": [1]}, to="dlx", lazy=True)
    assert view._ipython_key_completions_() == ["alpha", "beta"]
    path = tmp_path / "x.npz"
    np = pytest.importorskip("numpy")
    np.savez(path, w=np.ones(2), b=np.ones(1))
    with dlx.open(path) as file:
        assert file._ipython_key_completions_() == ["w", "b"]


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ('dlx.convert(x, to="', {"torch", "numpy", "dlx", "jax"}),
        ("dlx.convert(f(x, y), device='cpu', to='to", {"torch"}),
        ('with dlx.open("x.npz", to="nu', {"numpy"}),
        ('plan(x, to = "tor', {"torch"}),
        ('@dlx.using("to', {"torch"}),
        ('dlx.convert(\n    x,\n    to="to', {"torch"}),
        ('y = dlx.stack(\n    [f(x), g(\n        y,\n    )],\n    axis=1, to="nu', {"numpy"}),
        ('with dlx.open(\n    to="nu', {"numpy"}),
        ('dlx.convert(x)\ndf.save(a, to="', set()),
        ('print("to=")', set()),
        ('dlx.convert(x, to="torch", device="c', set()),
        ('save(x, to="', set()),
    ],
)
def test_notebooks_complete_targets(typed, found):
    """After ``to="``, in a call that has the parameter."""
    from dlx._api.notebook import complete_targets

    names = complete_targets(typed)
    assert found <= {*names} and bool(found) == bool(names)
    assert len(names) == 1 or len(found) != 1


@pytest.mark.parametrize("jedi", [True, False])
def test_ipython_completes_targets_keys_and_public_names(jedi):
    """In a running IPython, with and without jedi; no framework is imported."""
    pytest.importorskip("IPython")
    code = """
        import sys
        from IPython.core.completer import provisionalcompleter
        from IPython.terminal.interactiveshell import TerminalInteractiveShell

        shell = TerminalInteractiveShell.instance(history_manager=None)
        shell.Completer.use_jedi = sys.argv[1] == "True"
        shell.run_cell("import dlx; view = dlx.convert({'alpha': bytearray(2)}, to='dlx', lazy=True)")
        with provisionalcompleter():
            for typed in ('dlx.convert(\\n    b"a",\\n    to="to', "view['", "dlx.errors.D"):
                print(*[each.text for each in shell.Completer.completions(typed, len(typed))])
        assert "torch" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(jedi)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    targets, keys, errors = done.stdout.splitlines()
    assert targets == "torch"
    assert "alpha" in keys
    names = {each.rpartition(".")[2] for each in errors.split()}
    assert {"DeviceError", "DeviceNameError", "DlxError"} <= names <= {*dlx.errors.__all__}
