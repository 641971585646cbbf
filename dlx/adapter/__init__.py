"""What adapter authors import."""

from dlx.adapter.base import *  # noqa: F403
from dlx.adapter.base import __all__  # noqa: F401
