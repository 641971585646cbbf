"""`python -m dlx` is the command `dlx`."""

from __future__ import annotations

import sys

from dlx.cli import main

if __name__ == "__main__":
    sys.exit(main())
