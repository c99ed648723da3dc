"""Tests of the shim over the simulated driver."""
