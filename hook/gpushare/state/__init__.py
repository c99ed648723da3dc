"""The state directory: leases, limits files, activity files, usage files, refusals and the audit log."""
