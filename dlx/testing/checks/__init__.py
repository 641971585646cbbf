"""The checks: what a producer, a consumer and an adapter are held to."""
