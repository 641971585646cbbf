"""Which adapter knows a type, and which one a target names; how plugins are found and loaded.

No array is exported or converted here; `generic` stands for all types without an adapter of their own.
"""
