"""Lazy views, `convert(tree, to=..., lazy=True)`: an element is converted when it is first read."""
