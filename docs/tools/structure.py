"""Print the structure of dlx: size of each package, upward imports, import cycles, the longest import chain.

Run it from the root of a checkout: ``python docs/tools/structure.py``. Every import statement counts, even inside
functions and for type checkers; imports of a package count for its ``__init__``. A C file depends on the files that
define the functions and variables it names. ``map`` prints the table of packages in CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LAYERS = [
    ("errors", "typing", "ctypes", "_version", "_ffi"),
    ("_support",),
    ("_core",),
    ("_protocols",),
    ("adapter",),
    ("_registry",),
    ("_engine",),
    ("_views",),
    ("_files", "_sharing"),
    ("_api",),
    ("_using",),
    ("__init__",),
    ("cli", "testing", "__main__"),
]
"""Names in ``dlx/``, lowest layer first: a module imports from its own package and from lower layers only."""

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def list_modules(root: Path = ROOT) -> dict[str, Path]:
    """Return {module: file} of dlx; a package is its ``__init__``."""
    found = {}
    for path in sorted([*(root / "dlx").rglob("*.py"), *(root / "dlx").rglob("*.pyi")]):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def find_imports(module: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of dlx that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & known.keys()
            if inner - known.keys():
                found.add(node.module)
    return {name for name in found if name in known and name != module}


@functools.cache
def build_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Return {module: modules that it imports}."""
    known = list_modules(root)
    return {module: find_imports(module, path, known) for module, path in known.items()}


def find_c_names(text: str) -> set[str]:
    """Return the functions and variables that C source (formatted by clang-format) defines for other files."""
    top = r"(?m)^(?!static|extern|typedef|struct|enum|_Static_assert)(?:[\w*]+ )*[\w*]+[ *]"
    functions = re.findall(top + r"(\w+)\([^;{}]*\) \{", text)
    return {*functions, *re.findall(top + r"(\w+)(?:\[\w*\])*(?: =|;)", text)}


def build_c_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Return {C file: C files whose functions or variables it names}."""
    no_code = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^#.*?(?<!\\)$', re.DOTALL | re.MULTILINE)
    paths = sorted((root / "c_src").rglob("*.c"))
    texts = {str(path.relative_to(root)): no_code.sub(" ", path.read_text(encoding="utf-8")) for path in paths}
    home = {name: file for file, text in texts.items() for name in find_c_names(text)}
    return {
        file: {home[word] for word in re.findall(r"\w+", text) if word in home} - {file} for file, text in texts.items()
    }


def find_c_includes(root: Path = ROOT) -> dict[str, set[str]]:
    """Return {C file: files of c_src that it includes}."""
    paths = {path.name: str(path.relative_to(root)) for path in (root / "c_src").rglob("*.h")}
    return {
        str(path.relative_to(root)): {
            paths[name] for name in re.findall(r'#include "(?:\w+/)*([\w.]+)"', path.read_text(encoding="utf-8"))
        }
        for path in sorted((root / "c_src").rglob("*.[ch]"))
    }


def count_members(text: str) -> dict[str, int]:
    """Return {struct: number of members}; a macro that lists rows counts each row."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    lists = dict(re.findall(r"#define (\w+)\(\w+\)((?:[^\n]*\\\n)+[^\n]*)", text))
    text = re.sub(r"^[ ]*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.MULTILINE)
    found = {}
    for start in re.finditer(r"\bstruct( \w+)?\s*\{", text):
        end, depth = start.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        body = text[start.end() : end - 1]
        rows = sum(
            len(re.findall(r"(?m)^\s*\w+\(", lists[name])) for name in re.findall(r"(\w+)\(", body) if name in lists
        )
        while re.search(r"\([^()]*\)|\{[^{}]*\}", body):
            body = re.sub(r"\([^()]*\)|\{[^{}]*\}", "", body)
        name = re.match(r"\s*(\w*)", text[end:])[1] or (start[1] or "").strip() or "a struct without a name"
        found[name] = rows + body.count(";") + body.count(",")
    return found


def find_layer(module: str) -> str:
    """Return the layer of a module."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def find_upward(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Return each import of a higher layer."""
    return sorted(
        (module, other)
        for module, others in edges.items()
        for other in others
        if RANK[find_layer(other)] > RANK[find_layer(module)]
        or (
            RANK[find_layer(other)] == RANK[find_layer(module)]
            and find_layer(other) != find_layer(module)
            and find_layer(module) == "_version"
        )
    )


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    """Return the modules, or C files, of one cycle, or an empty list."""
    try:
        list(graphlib.TopologicalSorter(edges).static_order())
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def find_longest_chain(edges: dict[str, set[str]]) -> list[str]:
    """Return the longest chain of imports between Python files, the importing file first; requires no cycles."""

    @functools.cache
    def from_(module: str) -> tuple[str, ...]:
        return (module, *max((from_(other) for other in edges[module] if other != "dlx._ffi"), key=len, default=()))

    return list(max(map(from_, edges), key=len))


def format_map() -> str:
    """Return a table row for each package and module, lowest layer first, from its docstring."""
    rows = []
    for name in (name for names in LAYERS for name in names if not name.startswith("__") and name != "_ffi"):
        path = ROOT / "dlx" / name / "__init__.py"
        path = path if path.exists() else ROOT / "dlx" / f"{name}.py"
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        where = path.parent if path.name == "__init__.py" else path
        rows.append(f"| `{where.relative_to(ROOT)}` | {' '.join(text.partition(chr(10) * 2)[0].split())} |")
    return "\n".join(rows)


def main() -> None:
    """Print the structure."""
    if sys.argv[1:] == ["map"]:
        print(format_map())
        return
    edges = build_graph()
    known = list_modules()
    for names in LAYERS:
        for name in names:
            files = [path for module, path in known.items() if find_layer(module) == name]
            lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
            print(f"{name:14} {len(files):3} files {lines:6} lines")
    print("upward imports:", find_upward(edges) or "none")
    found = find_cycle(edges)
    print("import cycle:", " -> ".join(found) or "none")
    if not found:
        chain = find_longest_chain(edges)
        print(f"longest chain of imports: {len(chain)} files: {' -> '.join(chain)}")
    calls = build_c_graph()
    print("cycle of calls in C:", " -> ".join(find_cycle(calls)) or "none")
    for file in graphlib.TopologicalSorter(calls).static_order() if not find_cycle(calls) else ():
        print(f"{file:34} {len((ROOT / file).read_text(encoding='utf-8').splitlines()):5} lines")


if __name__ == "__main__":
    main()
