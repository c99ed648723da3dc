"""The device plugin, which offers devices and memory to kubelet, and so to the Kubernetes scheduler.

    offers.py      the offers of a node, and the variables for a container      (no side effects)
    checkpoint.py  reads which container has which units
    pairing.py     keeps memory and compute of a container on one device
    protocol.py    the messages of kubelet's device plugin API, v1beta1
    service.py     serves one resource on its own socket
    plugin.py      registers, and watches kubelet and the devices until SIGTERM

Only protocol.py, service.py and plugin.py need grpcio and protobuf (`pip install gpushare[kubernetes]`). A container's
start imports nothing of this package: it only reads two variables (dialects/gpushare_env.py).
"""
