"""Check that the installed files are dlx's own: another project on PyPI, called dlx, has a package of the same name."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["find_conflict"]

OURS, OTHER = "dlxarray", "dlx"


@functools.cache
def find_conflict() -> str:
    """Return what is wrong with the installed files of dlx, and the command that repairs it; empty if nothing is."""
    try:
        ours: metadata.Distribution | None = metadata.distribution(OURS)
    except metadata.PackageNotFoundError:  # a checkout
        ours = None
    changed = _find_changed(ours) if ours is not None else []
    try:
        version = metadata.version(OTHER)
    except metadata.PackageNotFoundError:
        version = ""
    if not version and not changed:
        return ""
    repair = f"{_pip('install')} --force-reinstall --no-deps {_find_source(ours)}"
    if changed:
        reason = f"{changed[0]} of {OURS} is missing or was changed"
    if version:
        reason = f"an unrelated project, dlx {version}, is installed, too; both have a dlx/__init__.py"
        remove = f"{_pip('uninstall')} --yes {OTHER}"
        repair = f"{remove} && {repair}" if ours is not None and _has_packages(ours) else remove
    return f"{reason}. Run: {repair}"


def _pip(verb: str) -> str:
    """Return a command of pip or uv for this environment: the first pip on the path may belong to another one."""
    python = _quote(sys.executable)
    if find_spec("pip") is None and shutil.which("uv"):
        return f"uv pip {verb} --python {python}"
    return f"{python} -m pip {verb}"


def _quote(path: str) -> str:
    """Quote a path for the system's shell."""
    return subprocess.list2cmdline([path]) if sys.platform == "win32" else shlex.quote(path)


def _has_packages(ours: metadata.Distribution) -> bool:
    """Return whether the packages are installed, not only linked to a checkout."""
    return any(file.parts[0] == "dlx" and file.hash for file in ours.files or ())  # an .egg-info has no hashes


def _find_changed(ours: metadata.Distribution) -> list[str]:
    """Return the installed files that are missing or differ from the hash that pip recorded."""
    changed = []
    for file in ours.files or ():
        if file.parts[0] not in ("dlx", "dlx_adapters") or file.hash is None:
            continue
        try:
            data = Path(str(file.locate())).read_bytes()
        except OSError:
            data = b""
        found = base64.urlsafe_b64encode(hashlib.new(file.hash.mode, data).digest()).rstrip(b"=").decode()
        if found != file.hash.value:
            changed.append(str(file))
    return changed


def _find_source(ours: metadata.Distribution | None) -> str:
    """Return the file or folder that dlx was installed from, if it still exists; else the name of the distribution."""
    found = ours.read_text("direct_url.json") if ours is not None else None
    text = unquote(urlsplit(json.loads(found)["url"]).path) if found else ""
    path = Path(text.lstrip("/") if sys.platform == "win32" else text) if text else None
    return OURS if path is None or not path.exists() else _quote(str(path))
