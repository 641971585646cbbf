"""`dlx doctor`: show each adapter with its framework, versions, the compiled core, and a block for bug reports."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import platform
import sys
import textwrap
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlx._core.driver import format_device, format_memory, format_version
from dlx._core.extension import ffi, lib
from dlx._registry.listing import can_be_target
from dlx._registry.modules import is_installed
from dlx._registry.plugin import OURS, error_of, install_of
from dlx._registry.registry import registry
from dlx._support.installation import find_conflict
from dlx._support.screen import Cell, Screen
from dlx._support.system import find_missing
from dlx._support.text import one_line
from dlx._version import __version__
from dlx.adapter.base import installed_version
from dlx.cli.model import BadInput, plural
from dlx.cli.probe import ask

_STYLES = {"ready": "good", "installed": "good", "missing": "quiet", "broken": "bad"}


@dataclass
class Row:
    """One adapter plugin with its framework."""

    name: str  # of the target, or the package of a broken plugin
    module: str
    distribution: str
    status: str  # "ready": imported, or tried with --load; "installed"; "missing"; "broken"
    version: str = ""  # of the framework
    cause: str = ""  # first line of the error, or how to install a missing framework
    details: str = ""  # the full traceback
    facts: dict[str, Any] = field(default_factory=dict)  # from the probe

    def document(self, verbose: bool) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            "name": self.name, "status": self.status, "version": self.version or None, "module": self.module,
            "distribution": self.distribution, "cause": self.cause or None,
            **({"details": self.details} if verbose else {}), "facts": self.facts or None,
        }  # fmt: skip

    def dlpack(self) -> str:
        """Return the DLPack version that its arrays export; empty without --load."""
        facts = self.facts.get("capsule")
        if not facts:
            return "none" if self.facts else ""
        if "refused" in facts:
            return "refused"
        return "legacy" if facts["version"] is None else ".".join(map(str, facts["version"]))


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Check every adapter; with --load, import each framework in a separate process."""
    rows = _rows()
    known = {row.name for row in rows}
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        raise BadInput(f"there is no adapter {unknown[0]!r}. Known: {', '.join(sorted(known))}")
    rows = [row for row in rows if not arguments.names or row.name in arguments.names]
    for row in rows:
        if arguments.load and row.status in ("ready", "installed"):
            with screen.working(f"importing {row.name}"):
                _load(row)
    with screen.working("querying the CUDA driver"):
        core = {**_core_facts(), "driver": ask("driver")}
    conflict = find_conflict()
    _show(rows, conflict, core, arguments, screen)
    documents = [row.document(arguments.verbose) for row in rows]
    screen.document({"conflict": conflict or None, "adapters": documents, "missing": find_missing(), **core})
    wanted = ("ready", "installed") if arguments.names else ("ready", "installed", "missing")
    return 1 if arguments.strict and (conflict or any(row.status not in wanted for row in rows)) else 0


def _rows() -> list[Row]:
    """Return a row for each plugin, without importing frameworks."""
    rows: list[Row] = []
    names = {plugin: root for root, plugin in reversed(registry.load_all().items())}  # the first name of each plugin
    for plugin, root in names.items():
        row = Row(root, plugin.module, plugin.distribution, "broken")
        rows.append(row)
        if plugin.broken is not None:
            row.cause = one_line(str(error_of(plugin)), 400)
            row.details = "".join(traceback.format_exception(plugin.broken))
            continue
        adapter = next((each for each in plugin.adapters if can_be_target(each)), plugin.adapters[0])
        row.name = adapter.name
        found = is_installed(adapter.package)
        row.status = "missing" if not found else "ready" if adapter.package in sys.modules else "installed"
        row.version = installed_version(adapter.package) if found else ""
        row.cause = one_line("; ".join(plugin.notes), 400) if found else install_of(adapter)
    return sorted(rows, key=lambda row: ([*_STYLES].index(row.status), row.name))


def _load(row: Row) -> None:
    """Import and try a row's framework in a separate process."""
    answer = ask("framework", row.name)
    if "broken" in answer:
        row.status, row.cause, row.details = "broken", one_line(answer["broken"], 300), answer["details"]
        return
    row.status, row.version = "ready", answer["version"]
    if answer.get("no_device"):
        row.cause = "it sees no device"
    else:
        row.facts = answer


def _show(rows: list[Row], conflict: str, core: dict[str, Any], arguments: argparse.Namespace, screen: Screen) -> None:
    table: list[list[Cell]] = []
    for row in rows:
        cells: list[Cell] = [(row.name, "name"), (row.status, _STYLES[row.status]), row.version]
        if arguments.load:
            cells += [row.dlpack(), ("yes" if row.facts["exchange_api"] else "no") if row.facts else ""]
        module = row.module if row.distribution == OURS else f"{row.module} ({row.distribution})"
        table.append([*cells, module, row.cause])
    if conflict:  # first: nothing below can be relied on
        reason, _, command = conflict.partition(" Run: ")
        screen.line((f"{reason} Run:", "bad"))
        screen.block(f"{command}\n")  # on one line, to be copied
    columns = ["name", "status", "version", *(["DLPack", "exchange API"] if arguments.load else []), "adapter", "note"]
    screen.table(columns, table)
    for name, reason in find_missing().items():
        screen.line("")
        screen.line((f"missing here: {name}", "quiet"), f" ({reason})")
    for row in rows if arguments.verbose else ():
        if row.details:
            screen.heading(row.name, "traceback")
            screen.block("\n".join(map(one_line, row.details.splitlines())))
        if faults := row.facts.get("defects"):
            screen.heading(f"{row.name} {row.version}", "known defects")
            screen.facts([("-", fault) for fault in faults])
    if not arguments.load:
        screen.line("")
        screen.line(("installed: not imported; --load imports and tries each in a separate process", "quiet"))
    screen.line("")
    screen.line(("for bug reports:", "quiet"))
    screen.block(_report(rows, core))


def _core_facts() -> dict[str, Any]:
    """Return facts about this Python and the compiled core, without paths of this machine."""
    from dlx import _ffi

    libc = " ".join(platform.libc_ver()).strip() if sys.platform == "linux" else ""
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
                name
                for name in ("_dlx_numpy", "_dlx_torch", "_dlx_tvm_ffi")
                if importlib.util.find_spec(f"dlx_adapters.{name}")
            ],
        },
    }


def _driver_lines(driver: dict[str, Any]) -> list[str]:
    """Return the CUDA driver and its devices in words, or the reason why it is missing, without folders."""
    cause, chosen = driver.get("missing") or driver.get("broken"), os.environ.get("DLX_CUDA_DRIVER", "")
    if cause:
        return [f"CUDA: {one_line(cause.replace(chosen, Path(chosen).name) if chosen else cause, 160)}"]
    devices = (f"{each['device']}: {format_memory(each)}, {format_device(each)}" for each in driver["devices"])
    return [f"CUDA: {format_version(driver)}", *devices]


def _report(rows: list[Row], facts: dict[str, Any]) -> str:
    """Return the block for bug reports."""
    core = facts["core"]
    built = f"built with {core['compiler']}: {core['flags']}"
    wrap = textwrap.TextWrapper(76, subsequent_indent="  ", break_on_hyphens=False).wrap
    lines = [
        f"dlx {__version__}: DLPack {core['dlpack'][0]}.{core['dlpack'][1]}, {core['file']}",
        f"exchange tables of dlx: {', '.join(core['extensions']) or 'none'}",
        *wrap(built),
        f"{facts['python']} ({core['compiler_of_python']})",
        facts["platform"],
        *itertools.chain.from_iterable(map(wrap, _driver_lines(facts["driver"]))),
    ]
    for row in rows:
        parts = [row.status]
        if row.facts:
            parts += [f"DLPack {row.dlpack()}", "exchange API" if row.facts["exchange_api"] else "no exchange API"]
            parts.append(plural(len(row.facts["defects"]), "known defect"))
        parts += [one_line(row.cause, 160)] if row.status == "broken" else []
        lines.append(f"{row.name} {row.version}".rstrip() + f": {', '.join(parts)}")
    return textwrap.indent("\n".join(lines), "    ")
