"""Every error message that dlx can raise, in one table: `messages.txt`, collected from the source."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from pathlib import Path

import pytest
from support.errors import advice
from support.project import ROOT

from dlx import errors
from dlx._core.native import _CLASSES

TABLE = Path(__file__).with_name("messages.txt")
FOREIGN = ("foreign_error", "foreign_errors", "adapter_call")  # they add the class and text of another error
DEPTH = 4  # calls that are followed to the text of a message
LIMIT = 24  # alternatives of one text
UNKNOWN = "{}"


class Source:
    """The functions and constants of a Python file, and the calls that it makes."""

    def __init__(self, path):
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.owner = {}  # of each node: the functions that it is in, innermost first
        self._enter(self.tree, ())
        self.constants = {}
        for node in self.tree.body:
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                if isinstance(target, ast.Name) and getattr(node, "value", None) is not None:
                    self.constants[target.id] = node.value
        self.nodes = list(ast.walk(self.tree))
        self.functions = {each.name: each for each in self.nodes if isinstance(each, ast.FunctionDef)}
        self.calls = [each for each in self.nodes if isinstance(each, ast.Call)]

    def _enter(self, node, owners):
        self.owner[node] = owners
        inside = (node, *owners) if isinstance(node, ast.FunctionDef) else owners
        for child in ast.iter_child_nodes(node):
            self._enter(child, inside)


@functools.cache
def sources():
    """Return the Python files of the library and its adapters, without the testing kit."""
    paths = [*(ROOT / "dlx").rglob("*.py"), *(ROOT / "dlx_adapters").glob("*.py")]
    return [Source(path) for path in sorted(paths) if "testing" not in path.parts]


def name_of(call):
    """Return the last name of the called expression."""
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def texts(node, source, depth=DEPTH):
    """Return the texts that an expression can give, with ``{name}`` for each part that varies."""
    return list(dict.fromkeys(itertools.islice(_texts(node, source, depth), LIMIT)))


def _texts(node, source, depth):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield from map("".join, itertools.product(*(_part(each) for each in node.values)))
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body, source, depth)
        yield from _texts(node.orelse, source, depth)
    elif isinstance(node, ast.Lambda):
        yield from _texts(node.body, source, depth)
    elif isinstance(node, ast.BoolOp):
        for each in node.values:
            yield from _texts(each, source, depth)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from (*_texts(node.left, source, depth), "")
    elif isinstance(node, ast.BinOp):
        pairs = itertools.product(texts(node.left, source, depth), texts(node.right, source, depth))
        yield from (left + right for left, right in pairs)
    elif isinstance(node, ast.Name) and node.id in source.functions and depth:
        for each in ast.walk(source.functions[node.id]):
            if isinstance(each, ast.Return) and each.value is not None:
                yield from _texts(each.value, source, depth - 1)
    elif isinstance(node, ast.Name) and depth:
        yield from _named(node, source, depth - 1)
    elif isinstance(node, ast.Call) and name_of(node) in source.functions and depth:
        function = source.functions[name_of(node)]
        for each in ast.walk(function):
            if isinstance(each, ast.Return) and each.value is not None:
                yield from _texts(each.value, source, depth - 1)
    elif isinstance(node, ast.Call) and name_of(node) == "format" and depth:
        yield from _texts(node.func.value, source, depth)
    elif not (isinstance(node, ast.Constant) and node.value is None):
        yield UNKNOWN


def _part(node):
    """Return the texts of a part of an f-string; a condition between two texts gives both."""
    if isinstance(node, ast.Constant):
        return [node.value]
    value = node.value
    if isinstance(value, ast.IfExp) and all(isinstance(each, ast.Constant) for each in (value.body, value.orelse)):
        return [str(value.body.value), str(value.orelse.value)]
    return ["{" + (getattr(value, "id", None) or getattr(value, "attr", "")) + "}"]


def _named(node, source, depth):
    """Give the texts of a name: of its assignments, of its parameter in each call, or of a constant."""
    for function in source.owner[node]:
        found = False
        for each in ast.walk(function):
            if isinstance(each, (ast.Assign, ast.AugAssign, ast.NamedExpr)):
                targets = getattr(each, "targets", [getattr(each, "target", None)])
                for target in targets:
                    pairs = [(target, each.value)]
                    if isinstance(target, ast.Tuple):
                        values = each.value.elts if isinstance(each.value, ast.Tuple) else [each.value] * 9
                        pairs = zip(target.elts, values, strict=False)
                        pairs = [(a, b if isinstance(each.value, ast.Tuple) else ast.Constant(...)) for a, b in pairs]
                    for one, value in pairs:
                        if isinstance(one, ast.Name) and one.id == node.id:
                            found = True
                            yield from _texts(value, source, depth)
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        keywords = [each.arg for each in function.args.kwonlyargs]
        if node.id in (*names, *keywords):
            yield from _passed(node.id, function, source, depth)
            return
        if found:
            return
    for each in (source, *sources()):
        if node.id in each.constants:
            yield from _texts(each.constants[node.id], each, depth)
            return
    yield UNKNOWN


def _passed(name, function, source, depth):
    """Give the texts that calls pass for a parameter, and its default."""
    spec = function.args
    names = [each.arg for each in (*spec.posonlyargs, *spec.args)]
    defaults = dict(zip(names[len(names) - len(spec.defaults) :], spec.defaults, strict=True))
    defaults |= {each.arg: value for each, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if value}
    if name in defaults:
        yield from _texts(defaults[name], source, depth)
    if not depth:
        yield UNKNOWN
        return
    called = function.name
    for other in sources():
        for call in other.calls:
            if name_of(call) != called or (other is not source and called.startswith("_")):
                continue
            given = {each.arg: each.value for each in call.keywords}
            is_method = names[:1] in (["self"], ["cls"]) and isinstance(call.func, ast.Attribute)
            given |= dict(zip(names[1:] if is_method else names, call.args, strict=False))
            if name in given:
                yield from _texts(given[name], other, depth)


HINTS = {"_Hint": (3, 1), "Refusal": (1, 2)}  # indices of reason and fix
KINDS = [name for name in errors.__all__ if name.endswith("Error")]
BUILTIN = ("TypeError", "ValueError")  # of invalid calls: the reason states the accepted values, then maybe a fix


def calls():
    """Give (file, class, reasons, fixes) of each place that makes an error; an option counts as a fix."""
    for source in sources():
        file = str(source.path.relative_to(ROOT))
        for call in source.calls:
            kind, keywords = name_of(call), {each.arg: each.value for each in call.keywords}
            if kind == "Rule" and len(call.args) > 2:
                can_copy = getattr(keywords.get("copy_resolves"), "value", False)
                fixes = ["(option)"] if can_copy else texts(keywords["fix"], source)
                yield file, call.args[1].id, texts(call.args[2], source), fixes
            elif kind in HINTS and len(call.args) > 2:
                reason, fix = (texts(call.args[i], source) if i < len(call.args) else [""] for i in HINTS[kind])
                yield file, "AdapterNotFoundError", reason, fix
            elif kind == "Blocker" and call.args and not isinstance(call.args[0], ast.Starred):
                fix = call.args[1] if len(call.args) > 1 else keywords.get("fix", ast.Constant(""))
                has_step = "resolution" in keywords or len(call.args) > 3
                yield file, kind, texts(call.args[0], source), ["(option)"] if has_step else texts(fix, source)
            elif kind in BUILTIN and call.args:
                for text in texts(call.args[0], source):
                    reason, _, fix = text.partition(". ")
                    yield file, kind, [reason], [fix] * bool(fix)
            elif (kind in KINDS or kind in FOREIGN) and call.args:
                fixes = texts(keywords["fix"], source) if "fix" in keywords else []
                yield file, kind, texts(call.args[0], source), fixes + ["(option)"] * ("option" in keywords)
        for node in source.nodes:  # tables of adapters: reason and fix
            if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
                for reason, fix in itertools.pairwise(node.elts):
                    pair = [getattr(each, "value", "") for each in (reason, fix)]
                    if all(isinstance(each, str) and " " in each for each in pair) and advice.VERBS.match(pair[1]):
                        yield file, "(table)", pair[:1], pair[1:]


def c_texts():
    """Give (file, class, reasons, fixes) of the errors of the C core; ``native.py`` maps statuses to classes."""
    for path in sorted((ROOT / "c_src").rglob("*.[ch]")):
        code = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.S)
        strings = r'(?:"(?:[^"\\]|\\.)*"\s*)+'
        for status, text in re.findall(rf"(?:py_raise\(\s*|\[-)(\w+)\]?(?:,| =)\s*({strings})", code):
            words = "".join(ast.literal_eval(each) for each in re.findall(r'"(?:[^"\\]|\\.)*"', text))
            words = re.sub(r"%(?:\.\d+)?(?:ll|z)?[a-zA-Z]", UNKNOWN, words)
            kind = _CLASSES[status].__name__ if status in _CLASSES else ""
            if kind or status == "status":
                reason, _, fix = words.partition(". ")
                yield str(path.relative_to(ROOT)), kind or "by status", [reason], [fix]


def table():
    """Return the table as text: for each file its errors, each with its reasons and, after ``>``, its fixes."""
    files, seen = {}, set()
    declared = ((str(path.relative_to(ROOT)), "(fix)", [], [text]) for path, text, _ in advice.declared(ROOT))
    for file, kind, reasons, fixes in (*calls(), *c_texts(), *declared):
        lines = [f"  {reason}" for reason in reasons if reason not in ("", UNKNOWN)]
        if kind != "(fix)" or re.sub("value", UNKNOWN, fixes[0]) not in seen:
            lines += [f"  > {fix}" for fix in fixes if fix] if lines or kind == "(fix)" else []
        seen.update(re.sub(r"\{\w*\}", UNKNOWN, fix) for fix in fixes)
        if lines:
            files.setdefault(file, {})["\n".join([kind, *lines])] = None
    return "\n\n".join("\n".join([file, *rows]) for file, rows in sorted(files.items())) + "\n"


# ---- rules -----------------------------------------------------------------------------------------------------------

LONGEST = 25  # words of a reason
TICS = re.compile(
    r"\b(?:of|by|for|to|with|in|on|from|after|before|and|or|than|as|is|says?|see|that|,) what "
    r"(?:is|are|was|were|the|a|an|it|they|dlx|its|has|can|may|must)\b|^what |\bof (?:its|their|one's|his) own\b"
    r"|\bstands? (?:there|for|in|at|on|here|beside|behind|first|alone|by)\b|\b(?:is|are|was|has|have|it|there) none\b"
    r"|\b(?:by|of|to|for|with) (?:whom|what)\b|, where (?:it|there|that|this|they|one|no|none|neither|the|a|an|its) "
    r"|\b(?:nobody|somebody|whoever|no one|anew|meanwhile|beside|mend(?:s|ed)?|perhaps|as it is|as they are)\b"
    r"|\b(?:is|are|was|were|be|been) (?:told|said|asked)\b",
    re.I,
)
"""Constructs that need decoding: a reason or a fix is written with subject, verb and object."""

ENTRIES = []  # (file, class, reasons, fixes)
for _block in TABLE.read_text(encoding="utf-8").split("\n\n"):
    _file, *_lines = _block.strip().split("\n")
    for _line in _lines:
        if not _line.startswith("  "):
            ENTRIES.append((_file, _line, [], []))
        else:
            ENTRIES[-1][2 + _line.startswith("  > ")].append(_line.lstrip(" >"))
every_file = pytest.mark.parametrize("file", dict.fromkeys(entry[0] for entry in ENTRIES))


def test_the_table_is_that_of_the_source():
    """``PYTHONPATH=tests python tests/api/test_messages.py`` writes new messages to the table, for review."""
    assert TABLE.read_text(encoding="utf-8") == table()
    assert len(ENTRIES) > 300


@every_file
def test_reasons(file):
    """A reason is one short clause in plain English, without a full stop."""
    for name, kind, reasons, _ in ENTRIES:
        for reason in reasons if name == file else ():
            assert not reason.endswith(".") or reason.endswith("..."), reason
            assert len(reason.split()) <= LONGEST, reason
            assert not TICS.search(reason), reason
            assert not reason.endswith(":") or kind in FOREIGN, reason


@every_file
def test_every_error_has_a_fix(file):
    """The fix is the error's, its class's or an option; a foreign error explains itself."""
    for name, kind, reasons, fixes in ENTRIES:
        if name == file and reasons and kind not in FOREIGN:
            assert fixes or kind in ("by status", *BUILTIN) or getattr(errors, kind).usual_fix, reasons


@every_file
def test_fixes(file):
    """A fix begins with a verb and ends with a full stop; `test_advice.py` tries the expressions in it."""
    for name, _, _, fixes in ENTRIES:
        for fix in fixes if name == file else ():
            if fix == "(option)" or fix.startswith(("{", "value")):
                continue
            assert advice.VERBS.match(fix) and fix.endswith((".", "!", "}")), fix
            assert not TICS.search(fix), fix


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
