"""`make gpu-check`: what holds on a GPU, and what it costs. Standard library only; rich and PyTorch if there."""
