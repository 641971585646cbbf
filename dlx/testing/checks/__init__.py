"""The checks: a module for each kind of promise that a producer, a consumer or an adapter makes."""
