"""The configuration file, node.json, which is compiled from it and the inventory, and the low-level runtime."""
