"""Engines for tests: each behind the interface of base.py, and one small image for all of them."""
