"""`make demo`: two containers share one simulated GPU."""
