"""Lazy views of containers, `convert(tree, to=..., lazy=True)`: an element is converted when it is first read.

A view is a sequence or a mapping; how its elements are converted is `_engine`'s business.
"""
