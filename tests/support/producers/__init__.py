"""A fuzzer of Python producers that break the protocol."""
