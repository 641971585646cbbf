"""NumPy arrays of every dtype and layout, and what the core should report about them."""
