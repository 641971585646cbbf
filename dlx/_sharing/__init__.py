"""Memory shared between processes: segments without a name, their handles, and trees laid out in them.

A segment is a sealed memfd. The kernel counts who holds it, so it goes with the last holder, however that one ends.
Memory of devices is the driver's; a segment describes it.
"""
