"""Saved files: their headers, read by hand, lazy read-only mappings over their data, and writers of four formats.

One module a format; `read` finds the right one. Headers are checked against the size of the file before anything is
given out, and no code in a file is ever run. What `dlx.open` maps, `dlx inspect` lists by the same modules.
"""
