"""NumPy arrays of every dtype and layout, and the core's expected answers."""
