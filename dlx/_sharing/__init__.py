"""Memory shared between processes: anonymous segments, handles to them, and the encoding of trees in them.

A segment is a sealed memfd. The kernel frees it with its last user, even if a process is killed. Device memory stays
in the driver's allocations, which a segment describes.
"""
