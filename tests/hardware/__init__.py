"""Check what holds on a GPU and what it costs (`make gpu-check`).

Standard library only; uses rich and PyTorch if present.
"""
