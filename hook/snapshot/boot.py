"""Fill a snapshot's memory, and resume it. snapshot.c runs this once, with the files of gpushare's modules on standard
input; two builds must make the same objects in the same order. A start that needs a module which is not here becomes
the ordinary program with the same command line: at once while the configuration is read, since nothing is reserved by
then; later only after the start is undone."""

import _ctypes
import _signal
import gc
import marshal
import posix
import sys
from _frozen_importlib import ModuleSpec

gc.disable()
LIBRARY = sys.path[0]  # Python's own modules


class Text:
    """Finds modules, and compiles them without docstrings and without the path of this tree."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> object:
        stem = ("hook/" if name.partition(".")[0] == "gpushare" else f"{LIBRARY}/") + name.replace(".", "/")
        for file in (f"{stem}/__init__.py", f"{stem}.py"):
            if posix.access(file, posix.R_OK):
                return ModuleSpec(name, Text, origin=file, is_package=file.endswith("/__init__.py"))
        return None

    create_module = staticmethod(lambda spec: None)

    @staticmethod
    def exec_module(module: object) -> None:
        name = module.__file__ = module.__spec__.origin
        ours, theirs = posix.pipe()
        if posix.fork() == 0:  # what compiling leaves in memory
            with open(name, "rb") as text, open(theirs, "wb") as pipe:
                marshal.dump(compile(text.read(), f"/snapshot/{name.removeprefix(LIBRARY)}", "exec", 0, True, 2), pipe)
            posix._exit(0)
        posix.close(theirs)
        with open(ours, "rb") as pipe:
            code = marshal.load(pipe)
        exec(code, module.__dict__)


sys.meta_path[2:] = [Text]  # behind those of built-in and frozen modules
for one in (sys.path, sys.path_hooks, sys.path_importer_cache):
    one.clear()
_ctypes.dlopen = lambda *_: 0
_ctypes.dlsym = lambda _, name: FUNCTIONS[name]  # noqa: F821, from snapshot.c

import importlib  # noqa: E402
import os  # noqa: E402
import threading  # noqa: E402

CODECS = ("ascii", "latin_1", "utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le", "utf_8_sig")
for name in ("json", "traceback", *(f"encodings.{codec}" for codec in CODECS)):  # what JSON may be written in
    importlib.import_module(name)

FIRST = ("gpushare.config.config", "pynvml")  # with which a start begins that compiles the configuration


class Others:
    """Finder for modules that the snapshot does not have; the last one in sys.meta_path."""

    missing = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in FIRST:
            self.become_ordinary()
        self.missing = True

    def become_ordinary(self) -> None:
        _signal.alarm(0)
        for number in (*runtime.deadline.WATCHED, *runtime.oci_runtime.PYTHON_IGNORES):
            _signal.signal(number, _signal.SIG_IGN if number in self.ignored else _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, self.blocked)
        try:
            os.lseek(0, 0, os.SEEK_SET)  # a hook's state, which the launcher keeps in a file
        except OSError:
            pass
        os.umask(self.umask)
        try:
            posix.execve(sys.argv[0], sys.argv, posix.environ)
        except OSError as error:  # the host has no Python
            raise runtime.KernelError(f"{sys.argv[0]}: {error.strerror}", "install gpushare again") from None


def resume(words: list, environ: dict, ignored: list) -> int:
    """The exit code. `words`: the ordinary program's path first; `environ`: bytes; `ignored`: numbers of signals."""
    sys.argv[:] = sys.orig_argv[:] = words
    for variables in (posix.environ, os.environ._data):
        variables.clear()
        variables.update(environ)
    constants.SHIM_DIR = installed.shim_dir(words[0])
    others.ignored, others.blocked = tuple(ignored), _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
    for number in (*ignored, *runtime.oci_runtime.PYTHON_IGNORES):  # as a new interpreter finds them and makes them
        _signal.signal(number, _signal.SIG_IGN)
    others.umask = os.umask(0o022)
    os.umask(others.umask)
    if words[0].endswith("/snapshot"):  # called by its own name, to see whether it goes on
        syscalls.filesystem_magic(0)
        return 0
    audit_log.begin()
    code = (hook if os.path.basename(words[0]).startswith("gpushare-hook") else runtime).main()  # or gpushare-hook.py
    if others.missing:
        others.become_ordinary()
    return code


for file in posix.read(0, 1 << 16).decode().split():
    importlib.import_module(file[len("hook/") : -len(".py")].replace("/", "."))
from gpushare.core import constants, installed  # noqa: E402
from gpushare.programs import hook, runtime  # noqa: E402
from gpushare.state import audit_log  # noqa: E402
from gpushare.system import syscalls  # noqa: E402

sys.meta_path[:] = [others := Others()]
posix.environ.clear()
os.environ._data.clear()
audit_log._began_ns = 0
threading._main_thread._native_id = 0
gc.collect()
gc.freeze()
