"""Lazy views of containers, `convert(tree, to=..., lazy=True)`: they convert an element when it is first read."""
