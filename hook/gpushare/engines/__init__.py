"""Configure container engines to use gpushare, and undo it (`gpushare runtime configure`).

    base.py                    Settings, Change, Proposal, and the interface of an engine module
    docker.py, containerd.py, crio.py, podman.py   pure: present text of the files -> new text
    jsontext.py, tomltext.py   change one entry of a text and keep the rest as it is written
    hookfiles.py               hooks.d files and containerd's base spec
    host.py                    files of this host: read, check, write all or none
    record.py                  previous content of the files: /var/lib/gpushare/configured/<engine>.json
    configure.py               the commands: configure, undo, status

Not on the start path.
"""
