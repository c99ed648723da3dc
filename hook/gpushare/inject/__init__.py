"""The plan of a container's mounts and files, and how it is carried out: in a namespace, or in config.json."""
