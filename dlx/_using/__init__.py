"""`using`: a decorator for a function that computes in one framework and returns arrays of its caller's framework."""
