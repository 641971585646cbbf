"""Helpers that know nothing of arrays: safe reflection, text, tables on a terminal, SVG, locks and tracebacks.

Nothing compiled is needed here. The command, the kit and the benchmarks use these modules, too.
"""
