"""Conversion of arrays: requests, plans, their execution, stream synchronization, and the data of the fast path.

One array is a batch of one; `tree` flattens containers. Lazy views and the public functions build on this package.
"""
