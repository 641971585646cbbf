"""`dlx convert`: write the arrays of a file in another format."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dlx._api.convert import convert, plan
from dlx._api.describe import describe
from dlx._files.atomic import replace_file
from dlx._files.header import NO_ARRAYS
from dlx._files.mapping import Archive, map_file
from dlx._files.writing import FORMATS, Item, write
from dlx._registry import lookup
from dlx._registry.generic import Deferred
from dlx._support.screen import Screen
from dlx._support.text import amount, one_line
from dlx.cli.model import BadInput, plural
from dlx.cli.sources import dotted_path, entries_of, stdin_file
from dlx.errors import DlxError, FileError, sentences


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Read the source as `dlx.open` does, and write the target."""
    source, target = str(arguments.source), Path(arguments.target)
    if target.suffix not in FORMATS:
        raise BadInput(f"{one_line(str(target), 120)}: its suffix must be one of {', '.join(FORMATS)}")
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(stdin_file(screen)) if source == "-" else source)
        try:
            with _naming_file(source):
                archive = map_file(path)
            stack.callback(archive.close)
            with _naming_file(source):
                items, others, names = _collect_items(archive, source)
            if not items:
                raise FileError("it contains no array", fix="List its contents with dlx inspect.")
            total = sum(item.nbytes for item in items)
            kept = {key: text for key, text in archive.metadata.items() if isinstance(text, str)}
            kept = kept if target.suffix in (".safetensors", ".arrow") else {}
            with (
                _naming_file(str(target)),
                replace_file(target, force=arguments.force) as file,
                screen.bytes_done(f"writing {target}", total) as done,
            ):
                write(file, target.suffix, items, kept, done)
        except DlxError as error:
            where = source if error.source in (None, "", str(path)) else error.source
            raise BadInput(f"{one_line(where, 120)}: {sentences(error.reason, error.fix)}") from error.__cause__
    size, lost = target.stat().st_size, len(archive.metadata) - len(kept)
    screen.line((str(target), "name"), f"  {plural(len(items), 'array')}, file of {amount(size)}")
    notes = [f"left out: {plural(others, 'value')} of other types"] if others else []
    notes += [f"left out: {one_line(', '.join(names), 200)}, without an array"] if names else []
    notes += [f"left out: {lost:,} of metadata, which {target.suffix} cannot store"] if lost else []
    for note in notes:
        screen.line((f"note: {note}", "quiet"))
    arrays = [
        {"path": each.name, "dtype": each.dtype.name, "shape": each.shape, "nbytes": each.nbytes} for each in items
    ]
    screen.document({"source": source, "target": str(target), "bytes": size, "notes": notes, "arrays": arrays})
    return 0


@contextlib.contextmanager
def _naming_file(file: str) -> Iterator[None]:
    """Add the file's name to an OSError, which `main` would otherwise report as an error of stdout."""
    try:
        yield
    except DlxError:  # some of these are OSErrors
        raise
    except OSError as error:
        raise BadInput(f"{one_line(file, 120)}: {error.strerror or error}") from error


def _collect_items(archive: Archive, source: str) -> tuple[list[Item], int, list[str]]:
    """Return the arrays of a file, to be read later, the number of other values, and the names without an array."""
    items: dict[str, Item] = {}
    names: list[str] = []
    stem = "stdin" if source == "-" else Path(source).stem
    others = 0

    def add(name: str, known: Any, refused: str, get: Callable[[], Any]) -> None:
        if name in items:
            raise FileError(f"two arrays would be named {one_line(name, 80)!r}", fix="Rename one in the source file.")
        info = _describe_or_refuse(name, known, refused)
        items[name] = Item(name, info.dtype, info.shape, _create_reader(get, source))

    for key in archive:
        value = archive[key]
        if isinstance(value, Deferred) and value.info.dtype_name in NO_ARRAYS:
            names.append(str(key))
            continue
        if lookup.kind(type(value)).handler is None and entries_of(value, dotted_path)[0]:
            add(str(key) or stem, value, "", functools.partial(archive.__getitem__, key))
            continue
        entries, rest = entries_of({key: value}, dotted_path)  # a .pt file contains trees and plain data
        others += rest
        for each in entries:
            add(each.path, each.obj, each.refused, functools.partial(getattr, each, "obj"))
    return list(items.values()), others, names


def _describe_or_refuse(name: str, obj: Any, refused: str) -> Any:
    """Describe an array without reading it, or raise its refusal."""
    error = None if refused else plan(obj, to="dlx", device="cpu", detach=True).error
    if isinstance(error, DlxError):
        refused = sentences(error.reason, error.fix)
    if refused:
        raise FileError(f"{one_line(name, 80)!r}: {refused}")
    return describe(obj)


def _create_reader(get: Callable[[], Any], source: str) -> Callable[[], Any]:
    def read() -> Any:
        with _naming_file(source):
            return convert(get(), to="dlx", device="cpu", detach=True)

    return read
