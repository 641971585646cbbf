"""The registry: find the adapter or container handler of a type, and the adapter of a target; load plugins.

It exports and converts no arrays. `generic` contains the adapters of types that no plugin lists.
"""
