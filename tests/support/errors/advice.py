"""Tests of the advice in errors: evaluate its expressions on the real object, and look up its options."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import inspect
import re

import dlx
from dlx.errors import DlxError
from support.errors.refused import NAMES

OPTIONS = re.compile(r"(?<![\w.(])([a-z_]+)=(?:\.\.\.|[\w'\"(-])?")
ALIASES = ("x", "it", "a", "t", "array", "dataset", "group", "table", "ref", "key", "obj", "tensor", "batch", "each")
"""Names that texts use for the refused object."""

_CLOSE = {"(": ")", "[": "]", "{": "}"}


def expressions(text):
    """Yield the Python expressions in a sentence: chains such as ``.cat.codes`` and ``numpy.asarray(x)``, and dicts."""
    i = 0
    while i < len(text):
        found = re.compile(r"(?<![\w\])])(?:[A-Za-z_]\w*)?\.(?=[A-Za-z_])|(?<![\w.])[A-Za-z_]\w*(?=[(\[])|\{").search(
            text, i
        )
        if found is None:
            return
        start, at = found.start(), found.start()
        while at < len(text):
            if text[at] in _CLOSE:
                at = _closed(text, at)
            elif text[at].isalnum() or text[at] == "_" or re.match(r"\.(?=[A-Za-z_])", text[at:]):
                at += 1
            else:
                break
        yield text[start:at]
        i = max(at, start + 1)


def _closed(text, at):
    """Return the position of the bracket that closes the one at this position."""
    waiting = []
    for i in range(at, len(text)):
        if text[i] in _CLOSE:
            waiting.append(_CLOSE[text[i]])
        elif waiting and text[i] == waiting[-1]:
            waiting.pop()
            if not waiting:
                return i + 1
    raise AssertionError(f"a bracket is not closed: {text[at:]!r}")


class Names(dict):
    """The names in a text: the object, values, and modules, which are imported on first use."""

    def __missing__(self, name):
        if hasattr(builtins, name):
            return getattr(builtins, name)
        try:
            return importlib.import_module(NAMES.get(name, name))
        except ImportError:
            raise NameError(f"there is no {name}") from None


def tried(text, obj):
    """Return the values of a text's expressions for an object, except those that fail for its values.

    Raises
    ------
    AssertionError
        If a name does not exist.
    """
    names = Names(dict.fromkeys(ALIASES, obj), value=0, n=2, name="a", path="no-file", query="select 1.0 as x")
    made = re.match(r"With x = (.*?), (?:call|convert) ", text)
    if made is not None:
        names["x"] = _value(made[1], names, text)
        text = text[made.end() :]
    results = []
    for expression in expressions(text):
        code = f"it{expression}" if expression.startswith(".") else expression
        code = re.sub(r"\.\.\.", "'dlx'", re.sub(r"\[\.\.\.\](?!\w)", "[()]", code))
        try:
            results.append(_value(code, names, text))
        except AssertionError:
            raise
        except Exception:  # the object's values do not support it
            continue
    return results


def _value(code, names, text):
    try:
        for module in re.findall(r"(?<![\w.])[a-z_]\w*(?:\.[a-z_]\w*)+", code):  # submodules are imported
            root = module.partition(".")[0]
            if root not in names and not hasattr(builtins, root):
                parts = [NAMES.get(root, root), *module.split(".")[1:]]
                for end in range(len(parts), 0, -1):
                    try:
                        importlib.import_module(".".join(parts[:end]))
                        break
                    except ImportError:
                        continue
        return eval(compile(ast.parse(code, mode="eval"), "advice", "eval"), names)
    except (AttributeError, NameError, SyntaxError) as error:
        raise AssertionError(f"{text!r} names what does not exist: {code}: {error}") from error
    except TypeError as error:
        if re.search("keyword|not callable|not subscriptable", str(error)) and not isinstance(error, DlxError):
            raise AssertionError(f"{text!r} cannot be followed: {code}: {error}") from error
        raise


def check_options(text, action="convert"):
    """Check that options in a text are parameters of the called function, or of a function in the text."""
    outside = text
    for expression in expressions(text):
        outside = outside.replace(expression, "")
    functions = [getattr(dlx, action, dlx.convert)]
    functions += [getattr(dlx, name) for name in re.findall(r"dlx\.([a-z_]+)\(", text) if hasattr(dlx, name)]
    known = {name for function in functions for name in inspect.signature(function).parameters}
    missing = set(OPTIONS.findall(outside)) - known
    assert not missing, f"{text!r} names {missing}, which {functions} lack"
    check_calls(text)


def check_calls(text):
    """Check that each call of dlx in a text has the parameters that it names."""
    for call in re.findall(r"dlx\.[a-z_.]+\([^()]*\)", text):
        node = ast.parse(call.replace("...", "None"), mode="eval").body
        function = eval(ast.unparse(node.func), {"dlx": dlx})
        unknown = {each.arg for each in node.keywords} - set(inspect.signature(function).parameters)
        assert not unknown, f"{text!r}: {ast.unparse(node.func)} has no {unknown}"


# ---- texts that the source declares ----------------------------------------------------------------------------------

VERBS = re.compile(
    r"((If|With) .+?, |\{(call|take)\} )?(Do not|Allocate|Allow|Call|Check|Cast|Choose|Compute|Convert|Copy|"
    r"Correct|Create|Decorate|Dereference|Detach|Download|Draw|Drop|Enable|Encode|Export|Extract|Fetch|Fill|Give|Import|Install|Join|Keep|Leave|"
    r"List|Make|Mark|Materialise|Merge|Move|Name|Open|Override|Pass|Plan|Put|Read|Remove|Rename|Repair|Report|Reset|"
    r"Reshape|Return|Run|Save|Send|Set|Share|Split|Start|Swap|Switch|Take|Try|Uninstall|Update|Use|View|Wait|Write|"
    r"(?<=, )(?:call|convert|open)|(?<=\} )[{\w])"
)
"""How a fix begins; adapters of data frames fill in ``{call}`` and ``{take}``."""

_SUFFIXES = {".npy", ".npz", ".safetensors", ".arrow", ".gguf", ".pt"}  # of files


def declared(root):
    """Yield (file, text, expressions) for each advice in the source; ``value`` replaces inserted values."""
    for path in sorted([*(root / "dlx").rglob("*.py"), *(root / "dlx_adapters").glob("*.py")]):
        if path.parts[-2] in ("testing", "checks", "subjects", "support"):
            continue
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        parts = {id(each) for node in nodes if isinstance(node, ast.JoinedStr) for each in node.values}
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in parts or id(node) in docs:
                continue
            if isinstance(node, ast.JoinedStr):
                text = "".join(each.value if isinstance(each, ast.Constant) else "value" for each in node.values)
            else:
                text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if VERBS.match(text) and " " in text and text.endswith((".", "!")):
                found = set(expressions(re.sub(r"\{(call|take|many|one)\}", "", text.replace("{values}", "value"))))
                if found - _SUFFIXES:
                    yield path, text, sorted(found - _SUFFIXES)


def is_rooted(expression):
    """Return True if an expression begins with a module; its names can be checked without an object."""
    root = re.match(r"[A-Za-z_]\w*", expression)
    return root is not None and root[0] not in (*ALIASES, "value", "handle", "Adapter", *dir(builtins))


def check_rooted(expression):
    """Check the names of an expression that begins with a module; return False if the module is missing."""
    names = re.match(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", expression)[0].split(".")
    try:
        found = importlib.import_module(NAMES.get(names[0], names[0]))
    except ImportError:
        return False
    for i, name in enumerate(names[1:], 1):
        if name == "value":
            break
        if not hasattr(found, name):
            with contextlib.suppress(ImportError):
                importlib.import_module(".".join([NAMES.get(names[0], names[0]), *names[1 : i + 1]]))
        assert hasattr(found, name), f"{expression!r}: {found} has no {name}"
        found = getattr(found, name)
    return True


def check_on_class(expression, path):
    """Check the first name of an expression on a class, ``package.module:Class``; skip missing modules."""
    module, _, name = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except ImportError:
        return
    first = re.match(r"\w*\.?([A-Za-z_]\w*)", expression)[1]
    assert hasattr(kind, first), f"{expression!r}: {kind} has no {first}"
