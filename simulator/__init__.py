"""The simulated NVIDIA driver: see HACKING.md."""
