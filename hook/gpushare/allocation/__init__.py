"""Which devices a request gets and how much of each: placement, admission, backends, limit changes."""
