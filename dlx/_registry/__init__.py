"""Which adapter knows a type, and which one a target names; how plugins are found and loaded."""
