"""The lowest layer: the compiled extension, devices, dtypes, tensors and CUDA as Python sees them.

Nothing here knows a framework or an adapter.
"""
