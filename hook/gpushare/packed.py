"""The modules of a start in one file, loaded at once: faster than so many imports (start path).

    load(path) -> bool      the first half is in sys.modules, the second will be when something of it is imported
    use(data, path)         the same for a program that has read the file, and found this module in it

packaging/pack writes the file: this Python's magic number, then four marshalled values, each behind its size: the code
of this module; the sources, the extension modules of Python's own that are imported, and the names of the second half;
and each half, a tuple of modules, each behind those that it imports. It is a cache of code: with another Python, or
when one source file is not what it was, nothing of it is used, and modules are imported as always; so are, also later,
those that are not in it.
"""

from __future__ import annotations

import _frozen_importlib_external as importer
import marshal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType
    from typing import Optional
else:
    _ABC = "_collections_abc"

    class _Kind(type):
        def __instancecheck__(cls, value):
            from collections.abc import Mapping

            return type.__instancecheck__(cls, value) or isinstance(value, Mapping)

    class _Mapping(metaclass=_Kind):
        """What os.environ is made of. Its methods are the real ones, when somebody wants one."""

        def __getattr__(self, name):
            from collections.abc import MutableMapping

            return getattr(MutableMapping, name).__get__(self)

    def _check_methods(kind, *methods):
        from _collections_abc import _check_methods as check

        return check(kind, *methods)

    if not {"os", _ABC} & sys.modules.keys():
        # All of os but its two mappings: the classes of collections.abc, which a start needs for nothing else, take
        # as long to make as the rest of os together
        sys.modules[_ABC] = _stand_in = type(sys)(_ABC)
        _stand_in.Mapping = _stand_in.MutableMapping = _Mapping
        _stand_in.GenericAlias = type(list[int])
        _stand_in._check_methods = _check_methods
        try:
            import os
        except ImportError:  # a Python whose os wants more
            pass
        del sys.modules[_ABC]
    import os

PROGRAMS = {  # program -> what its start imports: first, also for containers that ask for nothing; then for the others
    "gpushare-runtime": (
        "runtime applied request",
        "driverfiles idmap leases node placement plan policy procmask rootfs specedit spectree storage ticket",
    ),
    "gpushare-hook": (
        "hook request",
        "apply cachefile driverfiles idmap leases node placement plan policy procmask rootfs storage",
    ),
}
_spec_of_file = importer.spec_from_file_location
MAGIC: bytes = importer.MAGIC_NUMBER
_MAX_BYTES = 8 << 20


def load(path: str) -> bool:
    """False: nothing was loaded. Whoever could write the file could write our modules."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.read(fd, _MAX_BYTES)
        finally:
            os.close(fd)
    except OSError:
        return False
    return use(data, path)


def use(data: bytes, path: str) -> bool:
    """As `load`, which has read `data` from `path`."""
    try:
        if not data.startswith(MAGIC):
            return False
        _, head, first, then = _parts(memoryview(data)[len(MAGIC) :])
        sources, extensions, names = marshal.loads(head)
        for file, changed_ns, size in sources:
            status = os.stat(file)
            if status.st_mtime_ns != changed_ns or status.st_size != size:
                return False
    except (OSError, ValueError, EOFError, TypeError):
        return False
    folder = os.path.dirname(path)
    sys.meta_path.insert(0, _Rest(names, then, folder, extensions))
    _make(first, folder)
    return True


def _parts(data: memoryview) -> list[memoryview]:
    """Raises ValueError when it is cut off: code is not looked at again, so it must be all there."""
    found = []
    while data:
        size = int.from_bytes(data[:8], "little")
        if size > len(data) - 8:
            raise ValueError("cut off")
        found.append(data[8 : 8 + size])
        data = data[8 + size :]
    return found


def _make(half: memoryview, folder: str) -> None:
    for name, is_package, file, code in marshal.loads(half):
        if name not in sys.modules:
            _make_module(name, is_package, os.path.join(folder, file), code)


def _make_module(name: str, is_package: bool, file: str, code: CodeType) -> None:
    module = type(sys)(name)
    module.__spec__ = spec = _Spec(name, is_package, file)  # type: ignore[assignment]
    module.__package__, module.__file__ = spec.parent, file
    if is_package:
        module.__path__ = spec.submodule_search_locations = [os.path.dirname(file)]
    sys.modules[name] = module
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    above, _, last = name.rpartition(".")
    if above:
        setattr(sys.modules[above], last, module)


class _Loaded:
    """The loader of what is there already."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """It has run."""


class _Spec:
    """What is looked at of a ModuleSpec, whose making and whose `parent` are functions in Python."""

    _initializing = False  # each import looks; a missing one takes 0.5 us
    loader, loader_state, cached, has_location = _Loaded, None, None, False
    submodule_search_locations: Optional[list[str]] = None
    _uninitialized_submodules: list[str] = []  # since Python 3.11; a stack

    def __init__(self, name: str, is_package: bool, file: str) -> None:
        self.name, self.origin = name, file
        self.parent = name if is_package else name.rpartition(".")[0]


class _Rest:
    """Finds the modules of the second half, once: then all are there. And extension modules, without a search."""

    def __init__(self, names: tuple[str, ...], half: memoryview, folder: str, extensions: dict[str, str]) -> None:
        self._names, self._half, self._folder, self._extensions = names, half, folder, extensions

    def find_spec(self, name: str, path: object = None, target: object = None) -> Optional[ModuleSpec]:
        if name in self._extensions:
            file = self._extensions.pop(name)
            found = os.path.exists(file)
            return _spec_of_file(name, file, loader=importer.ExtensionFileLoader(name, file)) if found else None
        if name not in self._names:
            return None
        self._names = ()
        if not self._extensions:
            sys.meta_path.remove(self)
        _make(self._half, self._folder)
        return sys.modules[name].__spec__
