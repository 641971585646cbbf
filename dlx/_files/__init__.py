"""Saved files: parsers of their headers, lazy memory-mapped views of their arrays, and writers of four formats.

Each format has a module; `reading` chooses it. Headers are checked against the size of the file before any array is
returned, and code in a file is never run. `dlx.open` and `dlx inspect` use the same parsers.
"""
