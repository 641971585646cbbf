"""What several tests need: objects to convert, programs that run in their own process, and tools."""
