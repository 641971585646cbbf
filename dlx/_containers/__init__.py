"""Containers of arrays: which types are containers, and how a tree of them is flattened and unflattened."""
