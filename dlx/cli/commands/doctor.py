"""`dlx doctor`: each adapter and its framework, versions, the compiled core, and a block to paste into a report."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
import textwrap
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlx._core.extension import ffi, lib
from dlx._registry.modules import is_missing
from dlx._registry.plugin import OURS, error_of, install_of
from dlx._registry.registry import registry
from dlx._support.reflect import message_of
from dlx._support.screen import Cell, Screen
from dlx._support.text import one_line
from dlx._version import __version__
from dlx.adapter.base import installed_version
from dlx.cli.model import BadInput, counted
from dlx.cli.probe import ask
from dlx.cli.targets import can_be_target

__all__ = ["run"]

_STYLES = {"ready": "good", "installed": "good", "missing": "quiet", "broken": "bad"}
_ORDER = list(_STYLES)


@dataclass
class Row:
    """One adapter plugin with its framework."""

    name: str  # the target's, or the plugin's package where it is broken
    module: str
    distribution: str
    status: str  # "ready": imported, or tried with --load; "installed"; "missing"; "broken"
    version: str = ""  # of the framework
    cause: str = ""  # first line of what is broken, or how to install what is missing
    details: str = ""  # the whole traceback
    facts: dict[str, Any] = field(default_factory=dict)  # what the probe found


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Look at every adapter; with --load import each framework in a process of its own."""
    rows = _rows()
    known = {row.name for row in rows}
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        raise BadInput(f"there is no adapter {unknown[0]!r}. Known: {', '.join(sorted(known))}")
    rows = [row for row in rows if not arguments.names or row.name in arguments.names]
    if arguments.load:
        for row in rows:
            if row.status in ("ready", "installed"):
                with screen.working(f"importing {row.name}"):
                    _try(row)
    conflict = _conflict()
    _show(rows, conflict, arguments, screen)
    core = _core()
    screen.document(
        {"adapters": [_document(row, arguments.verbose) for row in rows], "conflict": conflict or None, **core}
    )
    wanted = ("ready", "installed") if arguments.names else ("ready", "installed", "missing")
    return 1 if arguments.strict and (conflict or any(row.status not in wanted for row in rows)) else 0


def _conflict() -> str:
    """Return what is wrong where the `dlx` of PyPI, another project, is installed as well: both own dlx/__init__.py."""
    from importlib import metadata

    try:
        version = metadata.version("dlx")
    except metadata.PackageNotFoundError:
        return ""
    return (
        f"another project, dlx {version}, is installed into the same package as {OURS}; they overwrite each other's "
        f"files. Run: pip uninstall dlx {OURS}, then install {OURS} again"
    )


def _rows() -> list[Row]:
    """Return a row for each plugin, by what can be known without importing a framework."""
    rows: list[Row] = []
    names = {plugin: root for root, plugin in reversed(registry.load_all().items())}  # the first of a plugin's names
    for plugin, root in names.items():
        row = Row(root, plugin.module, plugin.distribution, "broken")
        rows.append(row)
        if plugin.broken is not None:
            row.cause = one_line(str(error_of(plugin)), 400)
            row.details = "".join(traceback.format_exception(plugin.broken))
            continue
        adapter = next((each for each in plugin.adapters if can_be_target(each)), plugin.adapters[0])
        row.name = adapter.name
        try:
            found = adapter.package in sys.modules or _has(adapter.package)
        except Exception as error:  # a parent package that fails to import
            row.cause, row.details = one_line(message_of(error, 240), 300), traceback.format_exc()
            continue
        row.status = "missing" if not found else "ready" if adapter.package in sys.modules else "installed"
        row.version = installed_version(adapter.package) if found else ""
        row.cause = one_line("; ".join(plugin.notes), 400) if found else install_of(adapter)
    return sorted(rows, key=lambda row: (_ORDER.index(row.status), row.name))


def _has(package: str) -> bool:
    """Return whether a package can be found. Its parent is imported for it, and may be missing."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError as error:
        if not is_missing(package, error):
            raise
        return False


def _try(row: Row) -> None:
    answer = ask("framework", row.name)
    if "broken" in answer:
        row.status, row.cause, row.details = "broken", one_line(answer["broken"], 300), answer["details"]
    elif answer.get("no_device"):
        row.status, row.version, row.cause = "ready", answer["version"], "it sees no device"
    else:
        row.status, row.version, row.facts = "ready", answer["version"], answer


def _show(rows: list[Row], conflict: str, arguments: argparse.Namespace, screen: Screen) -> None:
    table: list[list[Cell]] = []
    for row in rows:
        cells: list[Cell] = [(row.name, "name"), (row.status, _STYLES[row.status]), row.version]
        if arguments.load:
            cells += [_spoken(row), ("yes" if row.facts.get("exchange_api") else "no") if row.facts else ""]
        table.append(
            [*cells, f"{row.module}" + (f" ({row.distribution})" if row.distribution != OURS else ""), row.cause]
        )
    columns = ["name", "status", "version", *(["DLPack", "exchange API"] if arguments.load else []), "adapter", "note"]
    screen.table(columns, table)
    if conflict:
        screen.line("")
        for line in textwrap.wrap(conflict, 96):
            screen.line((line, "bad"))
    if arguments.verbose:
        for row in rows:
            if row.details:
                screen.line("")
                screen.heading(row.name, "traceback")
                screen.block("\n".join(map(one_line, row.details.splitlines())))
            if faults := row.facts.get("defects", ()):
                screen.line("")
                screen.heading(f"{row.name} {row.version}", "known defects")
                screen.facts([("-", fault) for fault in faults])
    if not arguments.load:
        screen.line("")
        screen.line(("installed: not imported; --load imports and tries each in a process of its own", "quiet"))
    screen.line("")
    screen.line(("to paste into a report:", "quiet"))
    screen.block(_paste(rows))


def _spoken(row: Row) -> str:
    facts = row.facts.get("capsule")
    if not facts:
        return "none" if row.facts else ""
    if "refused" in facts:
        return "refused"
    return "legacy" if facts["version"] is None else ".".join(map(str, facts["version"]))


def _core() -> dict[str, Any]:
    """Return facts of this Python and of the compiled core; no path of this machine."""
    from dlx import _ffi

    libc = " ".join(platform.libc_ver()).strip()
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}" + (f", {libc}" if libc else ""),
        "core": {
            "file": Path(str(_ffi.__file__)).name,
            "compiler": ffi.string(lib.dlx_compiler()).decode(),
            "flags": ffi.string(lib.dlx_compile_flags()).decode(),
            "compiler_of_python": platform.python_compiler(),
            "dlpack": [lib.DLX_DLPACK_MAJOR, lib.DLX_DLPACK_MINOR],
            "byte_order": sys.byteorder,
            "extensions": [
                name for name in ("_dlx_numpy", "_dlx_torch", "_dlx_tvm_ffi") if importlib.util.find_spec(name)
            ],
        },
    }


def _paste(rows: list[Row]) -> str:
    facts = _core()
    core = facts["core"]
    lines = [
        f"dlx {__version__}: DLPack {core['dlpack'][0]}.{core['dlpack'][1]}, {core['file']}",
        f"exchange tables of dlx: {', '.join(core['extensions']) or 'none'}",
        *textwrap.wrap(
            f"built by {core['compiler']}: {core['flags']}", 76, subsequent_indent="  ", break_on_hyphens=False
        ),
        f"{facts['python']} ({core['compiler_of_python']})",
        facts["platform"],
    ]
    for row in rows:
        parts = [row.status]
        if row.facts:
            parts += [f"DLPack {_spoken(row)}", "exchange API" if row.facts["exchange_api"] else "no exchange API"]
            parts.append(counted(len(row.facts["defects"]), "known defect"))
        parts += [one_line(row.cause, 160)] if row.status == "broken" else []
        lines.append(f"{row.name} {row.version}".rstrip() + f": {', '.join(parts)}")
    return "\n".join(f"    {line}" for line in lines)


def _document(row: Row, verbose: bool) -> dict[str, Any]:
    return {
        "name": row.name, "status": row.status, "version": row.version or None, "module": row.module,
        "distribution": row.distribution, "cause": row.cause or None,
        **({"details": row.details} if verbose else {}), "facts": row.facts or None,
    }  # fmt: skip
