"""Attacks on the host, each as a real container; `table.py` lists them, `proof.py` judges all in the same way."""
