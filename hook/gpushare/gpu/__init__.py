"""The host's GPUs and driver: inventory, driver files, device nodes, MIG, NVML, forward compatibility."""
