"""The device plugin: how kubelet, and so the scheduler, is told of each device and each MiB that can be granted.

    offers.py      node -> what is offered, and what a container is given of it      (pure)
    protocol.py    the messages of kubelet's device plugin API, v1beta1
    service.py     one resource, served on a socket of its own
    plugin.py      registers, watches kubelet and the devices, until SIGTERM

Only protocol.py, service.py and plugin.py need grpcio and protobuf (`pip install gpushare[kubernetes]`). Nothing of it
is on the start path: a container's part of it is two variables in dialects/gpushare_env.py.
"""
