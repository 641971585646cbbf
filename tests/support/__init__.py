"""Helpers of several tests: objects to convert, programs that run in a separate process, and tools."""
