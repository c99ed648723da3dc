"""Behaviours of the driver, as programs that run on the simulator and on hardware."""
