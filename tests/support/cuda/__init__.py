"""The recording CUDA driver, frameworks over it, and real GPUs."""
