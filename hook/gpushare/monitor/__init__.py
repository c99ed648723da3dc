"""Monitoring: find containers that use more than their limit."""
