"""Fuzzing: targets.py is the table of targets, c/ and the other modules implement them, and corpus/ has their seeds."""
