"""Kubernetes and CDI: the device plugin, CDI specifications, node labels; and how all of it is removed."""
