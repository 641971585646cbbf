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
    # With hashes: an .egg-info that setup.py leaves in a checkout lists files, too.
    files = [file for file in (ours and ours.files) or () if file.parts[0] in ("dlx", "dlx_adapters") and file.hash]
    changed = [str(file) for file in files if file.hash and file.hash.value != _digest(file, file.hash.mode)]
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
        repair = f"{remove} && {repair}" if files else remove  # otherwise a checkout, or linked to one
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


def _digest(file: metadata.PackagePath, mode: str) -> str:
    """Return a file's hash as pip records it; empty if the file is missing."""
    try:
        data = Path(str(file.locate())).read_bytes()
    except OSError:
        return ""
    return base64.urlsafe_b64encode(hashlib.new(mode, data).digest()).rstrip(b"=").decode()


def _find_source(ours: metadata.Distribution | None) -> str:
    """Return the file or folder that dlx was installed from, if it still exists; else the name of the distribution."""
    found = ours.read_text("direct_url.json") if ours is not None else None
    text = unquote(urlsplit(json.loads(found)["url"]).path) if found else ""
    path = Path(text.lstrip("/") if sys.platform == "win32" else text) if text else None
    return OURS if path is None or not path.exists() else _quote(str(path))
