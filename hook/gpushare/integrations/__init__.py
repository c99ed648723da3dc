"""Kubernetes and CDI: the device plugin, CDI specifications and node labels; and the removal of gpushare."""
