"""What `gpushare runtime configure` writes for each container engine, and how it is taken out again.

    base.py                    Settings, Change, Proposal, and what an engine module is
    docker.py, containerd.py, crio.py, podman.py   pure: text of the files now -> text of the files then
    jsontext.py, tomltext.py   changing one entry of a text and leaving all others as they are written
    hookfiles.py               hooks.d files and containerd's base spec
    host.py                    the files of this host: reading, checking, writing all or nothing
    record.py                  what was there before: /var/lib/gpushare/configured/<engine>.json
    configure.py               these together: configure, undo, status

Not on the start path.
"""
