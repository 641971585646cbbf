"""The functions with types in the stub of this module; editors find their docstrings here.

Nothing imports this module. Docstrings in the stub would be duplicates.
"""

from dlx._api.convert import convert
from dlx._api.open import open
from dlx._api.share import attach, share
from dlx._api.stack import stack

__all__ = ["attach", "convert", "open", "share", "stack"]
