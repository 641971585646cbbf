"""Programs that run for long: soak, kills, exits, interrupts, allocations, threads, fuzzing."""
