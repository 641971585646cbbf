"""Which types are containers; trees flattened into their arrays, and rebuilt around the results.

What becomes of the arrays is decided and done in `_engine`.
"""
