"""The checks of producers, consumers and adapters."""
