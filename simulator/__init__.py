"""The simulated NVIDIA driver: see README.md."""
