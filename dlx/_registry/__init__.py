"""Which adapter or container handler knows a type, and which adapter a target names; how plugins are found and loaded.

No array is exported or converted here; `generic` has the adapters of types that no plugin lists.
"""
