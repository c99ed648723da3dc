"""Programs that run natively and under the shim: see tests/gpu/tenant.py."""
