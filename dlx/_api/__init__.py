"""The public functions: `convert`, `plan`, `stack`, `shares_memory`, `open`, `share`, and functions for C programs.

They check their arguments and call the packages below, which do the work.
"""
