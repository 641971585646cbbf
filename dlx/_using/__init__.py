"""`using`: a decorator whose function computes in one framework and returns arrays of its caller's."""
