"""The configuration file, node.json (compiled from it and the inventory), and the low-level runtime."""
