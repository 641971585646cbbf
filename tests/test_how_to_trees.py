"""What docs/how-to/trees-and-views.md shows is what happens."""

from __future__ import annotations

import re

from conftest import ROOT

PAGE = (ROOT / "docs" / "how-to" / "trees-and-views.md").read_text(encoding="utf-8")


def test_every_block_of_the_page_runs_in_its_order(np, torch, tmp_path, monkeypatch):
    """In one namespace, as a reader would type them; the asserts in them hold."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    namespace = {"__name__": __name__}  # dataclasses look their module up
    for n, code in enumerate(blocks):
        exec(compile(code, f"block {n}", "exec"), namespace)
    assert len(blocks) == 7 and len(PAGE.splitlines()) <= 120
