"""Watch the driver for Xid errors, through NVML's events, in a thread of its own.

    watch = XidWatch(library, ignored, report)
    watch.errors()      -> {uuid of a GPU: the Xid after which it counts as unhealthy}
    watch.close()

A Xid error stands until the driver is loaded again, since NVML reports no recovery. NVML calls may hang in a broken
driver, so the thread is a daemon and close() does not wait for it. Without NVML (a pod without the driver's library and
device nodes) the plugin reports that once and watches nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection

from ..gpu import nvml

_WAIT_MS = 500
_RETRY_S = 5.0


class XidWatch:
    def __init__(self, library: str, ignored: Collection[int], report: Callable[[str], None], wake: int) -> None:
        """`wake`: a pipe's descriptor, to which a byte is written at each change."""
        self._library, self._ignored, self._report, self._wake = library, frozenset(ignored), report, wake
        self._lock = threading.Lock()
        self._errors: dict[str, int] = {}
        self._ended = threading.Event()
        self._last = ""
        threading.Thread(target=self._run, daemon=True).start()

    def errors(self) -> dict[str, int]:
        with self._lock:
            return dict(self._errors)

    def close(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._session()
            except Exception as error:  # a missing library, or any error of NVML
                self._say(f"Xid errors are not watched: {error}")
            self._ended.wait(_RETRY_S)

    def _say(self, text: str) -> None:
        if text != self._last:
            self._last = text
            self._report(text)

    def _session(self) -> None:
        """Watch until NVML fails, as when the driver is unloaded. A new session begins without errors."""
        pynvml = nvml.initialised(self._library)
        try:
            events = pynvml.nvmlEventSetCreate()
            for index in range(pynvml.nvmlDeviceGetCount()):
                gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
                nvml.supported(pynvml.nvmlDeviceRegisterEvents, gpu, pynvml.nvmlEventTypeXidCriticalError, events)
            self._set({})
            self._say("Xid errors are watched")
            while not self._ended.is_set():
                try:
                    event = pynvml.nvmlEventSetWait_v2(events, _WAIT_MS)
                except pynvml.NVMLError_Timeout:
                    continue
                self._take(nvml.text_of(pynvml.nvmlDeviceGetUUID(event.device)), int(event.eventData))
        finally:
            pynvml.nvmlShutdown()

    def _take(self, uuid: str, xid: int) -> None:
        if xid in self._ignored:
            self._report(f"GPU {uuid}: Xid {xid}, which is ignored")
        else:
            self._set({**self._errors, uuid: xid})

    def _set(self, errors: dict[str, int]) -> None:
        with self._lock:
            changed, self._errors = errors != self._errors, errors
        if changed and not self._ended.is_set():
            os.write(self._wake, b"x")
