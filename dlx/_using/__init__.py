"""The decorator `using`, which converts the arguments and results of a function, and tracks its writes and streams."""
