"""The decorator `using`: a function computes in one framework for callers of any.

Arguments and results are converted as by `convert`; what is here is one call, its writes and its streams.
"""
