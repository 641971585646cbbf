"""Measurements of dlx against the frameworks' own functions; `python -m benchmarks`."""
