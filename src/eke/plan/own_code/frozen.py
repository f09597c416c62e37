"""Frozen texts of own code: stored when planned, copied to run folders, imported from there."""

import hashlib
import importlib.abc
import importlib.machinery
import linecache
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

from eke.common.errors import ChangedError
from eke.common.files import is_trusted, make_private_dir, write_atomic
from eke.data.sources import cache_folder
from eke.plan.own_code.find import Code


def code_store(code: Code) -> Path:
    """Return the folder in the user's cache with the texts of this code."""
    return cache_folder() / "own_code" / code.digest


def frozen_folder(run: Path) -> Path:
    """Return the folder of the texts in a run folder."""
    return run / "code"


def store_code(code: Code, run: Path | None = None) -> None:
    """Store the planned texts, so that edits do not change runs that start later.

    `run` is a run folder to read them from, by default they are read where they were found.
    ChangedError: A file was edited since `find_code`.
    """
    folder = code_store(code)
    for name, file in code.files.items():
        place = folder / f"{name}.py"
        if file.path and not _has(place, file.sha256):
            text = (frozen_folder(run) / place.name if run else Path(file.path)).read_bytes()
            if hashlib.sha256(text).hexdigest() != file.sha256:
                raise ChangedError(f"{file.path} was edited during planning -> repeat the command")
            make_private_dir(folder)
            write_atomic(place, text.decode())


def freeze_code(code: Code, run: Path) -> None:
    """Copy the stored texts into a run folder, unless it has them."""
    folder = frozen_folder(run)
    make_private_dir(folder)
    for name, file in code.files.items():
        place = folder / f"{name}.py"
        if file.path and not _has(place, file.sha256):
            shutil.copyfile(code_store(code) / place.name, place)


def has_own_texts(code: Code, run: Path) -> bool:
    """Return whether this user wrote the texts in a run folder."""
    texts = [name for name, file in code.files.items() if file.path]
    return all(is_trusted(frozen_folder(run) / f"{name}.py") for name in texts)


def _has(place: Path, sha256: str) -> bool:
    try:
        return hashlib.sha256(place.read_bytes()).hexdigest() == sha256
    except OSError:
        return False


class _Finder(importlib.abc.MetaPathFinder):
    """Finder of the frozen modules, and of no other module in their folders."""

    def __init__(self, code: Code, folder: Path) -> None:
        self.code, self.folder = code, folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how to load a frozen module."""
        file = self.code.files.get(fullname)
        if file is None:
            return None
        loader = _Loader(self, fullname)
        spec = importlib.machinery.ModuleSpec(
            fullname, loader, origin=file.path or None, is_package=file.is_package
        )
        spec.has_location = bool(file.path)  # sets __file__: data next to a module is found
        return spec


class _Loader(importlib.abc.InspectLoader):
    """Loader of one frozen module under its original path."""

    def __init__(self, finder: _Finder, name: str) -> None:
        self.finder, self.name = finder, name

    def is_package(self, fullname: str) -> bool:
        """Return whether the module is a package."""
        return self.finder.code.files[fullname].is_package

    def get_source(self, fullname: str) -> str:
        """Return the frozen text. ChangedError: It is missing or differs from the plan."""
        file = self.finder.code.files[fullname]
        if not file.path:
            return ""
        place = self.finder.folder / f"{fullname}.py"
        if not _has(place, file.sha256):
            raise ChangedError(f"{place} is not as planned -> repeat the command")
        text = place.read_text(encoding="utf-8")
        # Tracebacks and `inspect` read this instead of the file, which may have been edited.
        linecache.cache[file.path] = (len(text), None, text.splitlines(keepends=True), file.path)
        return text

    def get_code(self, fullname: str) -> CodeType:
        """Compile the text under its original path."""
        path = self.finder.code.files[fullname].path
        return compile(self.get_source(fullname), path or f"<{fullname}>", "exec")


def serve_code(code: Code | None, folder: Path) -> None:
    """Make the frozen modules in `folder` importable, and forget those served before."""
    served = [each for each in sys.meta_path if isinstance(each, _Finder)]
    if code and [(each.code.digest, each.folder) for each in served] == [(code.digest, folder)]:
        return
    for finder in served:
        sys.meta_path.remove(finder)
        for name in finder.code.files:
            sys.modules.pop(name, None)
    if code is not None:
        sys.meta_path.insert(0, _Finder(code, folder))


def is_served(path: str) -> bool:
    """Return whether a source file is one of the frozen modules."""
    finders = [each for each in sys.meta_path if isinstance(each, _Finder)]
    return any(path == file.path for finder in finders for file in finder.code.files.values())
