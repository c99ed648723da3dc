"""Attacks on the host, each as a real container; `table.py` lists them, `proof.py` judges them all in the same way."""
