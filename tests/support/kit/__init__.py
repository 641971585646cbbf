"""Good and bad subjects for the conformance kit."""
