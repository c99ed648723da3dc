"""The OCI spec, the schedulers' dialects and the policy: what a container requests."""
