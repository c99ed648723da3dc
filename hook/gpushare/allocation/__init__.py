"""Choose the devices for a request and the amount on each: placement, admission, backends, limit changes."""
