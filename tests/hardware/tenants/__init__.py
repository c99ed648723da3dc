"""Programs that run natively and under the shim: see tests/hardware/tenant.py."""
