"""The DRA driver, which offers devices to the Kubernetes scheduler and prepares claims for kubelet.

    slices.py      the ResourceSlice of a node                              (no side effects)
    claims.py      what a claim was allocated, and its CDI specification    (no side effects)
    parameters.py  the opaque parameters of a claim, and their JSON schema  (no side effects)
    apiserver.py   the four requests to the API server
    protocol.py    the messages of kubelet's plugin registration and DRA APIs
    service.py     serves kubelet, and writes the CDI specifications
    driver.py      publishes the devices and serves until SIGTERM

A container's start imports nothing of this package: it only reads variables (request/dialects/claims.py).
"""

from ...core import constants

DRIVER = "gpushare.io"
# CDI specification of a prepared claim; a write that was killed leaves a file with UNFINISHED after the name
(PREFIX, SUFFIX), UNFINISHED = constants.CLAIM_FILE.split("%s"), ".new"
