"""Helpers without arrays and compiled code: safe reflection, text, terminal tables, SVG, locks and tracebacks.

The command line, the testing kit and the benchmarks use these modules, too.
"""
