"""`dlx convert`: write the arrays of a file in another format, with `dlx.save`'s functions."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from dlx._api.save import collect_items, text_metadata, write_items
from dlx._engine.casting import read_casts
from dlx._files.mapping import map_file
from dlx._files.selection import dotted_path
from dlx._files.writing import FORMATS, WITH_METADATA
from dlx._registry.generic import Deferred
from dlx._support.screen import Screen
from dlx._support.text import amount, one_line
from dlx.cli.model import BadInput, plural
from dlx.cli.sources import stdin_file
from dlx.cli.targets import command_option
from dlx.errors import DlxError, sentences

NAMED = 8  # values that are left out and named


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Read the source as `dlx.open` does, and write the target as `dlx.save` does."""
    source, target = str(arguments.source), Path(arguments.target)
    if target.suffix not in FORMATS:
        raise BadInput(f"{one_line(str(target), 120)}: its suffix must be one of {', '.join(FORMATS)}")
    with contextlib.ExitStack() as stack:
        file = source
        path = Path(stack.enter_context(stdin_file(screen)) if source == "-" else source)
        try:
            archive = map_file(path, only=arguments.only, skip=arguments.skip)
            stack.callback(archive.close)
            stem = "stdin" if source == "-" else path.stem
            casts, has_lists = read_casts(arguments.dtype), target.suffix == ".arrow"
            items, others = collect_items(archive, stem, casts, has_lists=has_lists)
            metadata = text_metadata(archive) if target.suffix in WITH_METADATA else {}
            lost = len(archive.metadata) - len(metadata)
            total = sum(item.nbytes for item in items)
            file = str(target)
            with screen.bytes_done(f"writing {target}", total) as done:
                write_items(items, target, metadata, force=arguments.force, sync=True, advance=done)
        except DlxError as error:
            where = source if error.source != str(target) else error.source
            error.via = ""  # the command has the options
            fix = error.advice(command_option)
            reason = f"{dotted_path(error.path)!r}: {error.reason}" if error.path else error.reason
            raise BadInput(f"{one_line(where, 120)}: {sentences(reason, fix)}") from error.__cause__
        except OSError as error:
            raise BadInput(f"{one_line(file, 120)}: {error.strerror or error}") from error
    size = target.stat().st_size
    names = [name for name, value in others if isinstance(value, Deferred)]
    screen.line((str(target), "name"), f"  {plural(len(items), 'array')}, file of {amount(size)}")
    plain = [name for name, value in others if not isinstance(value, Deferred)]
    few = f": {one_line(', '.join(plain[:NAMED]), 200)}{', …' * (len(plain) > NAMED)}"
    notes = [f"left out: {plural(len(plain), 'value')} of other types{few}"] if plain else []
    notes += [f"left out: {one_line(', '.join(names), 200)}, without an array"] if names else []
    notes += [f"left out: {lost:,} of metadata, which {target.suffix} cannot store"] if lost else []
    for note in notes:
        screen.line((f"note: {note}", "quiet"))
    arrays = [
        {"path": each.name, "dtype": each.dtype.name, "shape": each.shape, "nbytes": each.nbytes} for each in items
    ]
    screen.document({"source": source, "target": str(target), "bytes": size, "notes": notes, "arrays": arrays})
    return 0
