"""The public functions: `convert`, `plan`, `stack`, `shares_memory`, `open`, and those for C programs.

They check their arguments and call the packages below, which do the work.
"""
