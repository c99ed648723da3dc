"""Fuzzing: targets.py is the table, c/ and the modules beside it the targets, corpus/ what they start from."""
