"""Errors, names, types, amounts and operations. Imports nothing else of gpushare."""
