"""Linux: system calls, namespaces, cgroups, processes, ELF files, paths below a root."""
