"""The compiled extension, and devices, dtypes, tensors, streams and CUDA as Python sees them.

Nothing here knows a framework or an adapter.
"""
