"""Ways to start a container: each engine behind the interface of base.py, and one small image for all of them."""
