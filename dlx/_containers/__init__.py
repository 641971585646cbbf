"""Containers of arrays: which types are containers, and how a tree of them is taken apart and put together again."""
