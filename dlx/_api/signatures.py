"""The functions whose types stand in the stub beside this: an editor finds their docstrings here.

Nothing imports it. A stub's own docstring would be a second one.
"""

from dlx._api.convert import convert
from dlx._api.open import open
from dlx._api.stack import stack

__all__ = ["convert", "open", "stack"]
