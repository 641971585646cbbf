"""Conversion of arrays: the request, the plan, its execution, the order of streams, what the fast path needs.

One array is a batch of one. Containers are flattened by `tree`; lazy views and the public functions are above.
"""
