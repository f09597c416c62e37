"""Source files of own code: those of the targets, and those that their text imports."""

import ast
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.paths import user_path
from eke.common.text import suggest_match
from eke.config.parts import Part
from eke.plan.identity import canonical


@dataclass(frozen=True)
class CodeFile:
    """One module of own code."""

    path: str
    """Absolute path at planning, also `__file__` of the frozen module. Empty for a folder without
    `__init__.py`."""
    sha256: str
    """Hash of the text."""
    is_package: bool


@dataclass(frozen=True)
class Code:
    """Own code of a run."""

    folders: tuple[str, ...]
    """Folders that contain the top-level modules."""
    files: dict[str, CodeFile]
    """Module name -> file. Only these modules can be imported from the folders."""
    packages: dict[str, str] = field(default_factory=dict)
    """Installed package of a target -> version."""
    warnings: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """Hash of all texts and versions, 16 hex digits. Independent of the folders."""
        texts = {name: file.sha256 for name, file in self.files.items()}
        return hashlib.sha256(canonical([texts, self.packages]).encode()).hexdigest()[:16]


@dataclass
class _Found:
    """Files found so far."""

    roots: dict[str, Path] = field(default_factory=dict)
    """Top-level module -> folder that contains it."""
    files: dict[str, CodeFile] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    warnings: dict[str, None] = field(default_factory=dict)


def find_code(
    parts: Sequence[Part], path: str | None = None, config_dir: Path | None = None
) -> Code | None:
    """Return the code of all targets, None without a target.

    `path` is the only folder to search (`code.path`). By default, these are the current folder, its
    `src`, and the parent of `config_dir`. ConfigError: A target's module is missing, is ambiguous,
    has a syntax error, or belongs to another user.
    """
    if not parts:
        return None
    folders = [user_path(path)] if path else [Path.cwd(), Path.cwd() / "src"]
    if config_dir and not path:
        folders.append(config_dir.resolve().parent)
    folders = list(dict.fromkeys(folder.resolve() for folder in folders))
    found, problems = _Found(), list[Problem]()
    for part in parts:
        try:
            _add_target(part, folders, found)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    used = dict.fromkeys(str(folder) for folder in found.roots.values())
    files = dict(sorted(found.files.items()))
    return Code(tuple(used), files, dict(sorted(found.packages.items())), tuple(found.warnings))


def target_key(part: Part) -> str:
    """Return the key that names the target: `model.target`, `data.collate`."""
    return part.key if part.key in ("data.collate", "loss.per") else f"{part.key}.target"


def _add_target(part: Part, folders: Sequence[Path], found: _Found) -> None:
    name = part.target.replace(":", ".")
    top = name.partition(".")[0]
    if top not in found.roots:
        place = _environment_place(top)
        if place is not None and _is_installed(place):
            distribution = _distributions().get(top, [top])[0]
            found.packages[distribution] = _version(distribution)
            return
        if place is not None:  # an editable installation, or PYTHONPATH
            found.roots[top] = place.parent
        else:
            found.roots[top] = _search(part, top, folders)
    root = found.roots[top]
    module = next((m for m in _prefixes(name) if _module_file(root, m)), "")
    # In a package, only the last name can be a class: `net.mmodel.Net` names a missing module.
    names = name.removeprefix(module).count(".")
    file = _module_file(root, module) if module else None
    if file is None or (names > 1 and (file.is_dir() or file.name == "__init__.py")):
        raise ConfigError(_missing(part, name.rpartition(".")[0], root))
    _add_module(module, root, found, part)


def _prefixes(name: str) -> Iterator[str]:
    """Yield `a.b.c`, `a.b`, `a`."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _search(part: Part, top: str, folders: Sequence[Path]) -> Path:
    """Return the first folder with the module. ConfigError: It is in none, or differs in two."""
    having = [folder for folder in folders if _module_file(folder, top)]
    if not having:
        near = {
            p.stem for f in folders if f.is_dir() for p in f.iterdir() if _module_file(f, p.stem)
        }
        guess = suggest_match(top, sorted(near))
        why = f"no module {top} is installed, or in {', '.join(map(str, folders))}"
        key = target_key(part)
        fix = (
            Fix(f"{key}={guess}{part.target[len(top) :].replace(':', '.')}")
            if guess
            else Fix("code.path=FOLDER", remark="the folder that contains it")
        )
        raise ConfigError(Problem(key, part.target, why, fix, "no_module"))
    first, *others = having
    for other in others:
        if _digest_at(part, first) != _digest_at(part, other):
            why = f"{top} is in {first} and in {other}, with other content"
            fix = Fix(f"code.path={first}")
            raise ConfigError(Problem(target_key(part), part.target, why, fix, "two_modules"))
    return first


def _digest_at(part: Part, root: Path) -> str:
    """Return the digest of a target's code if its module is taken from `root`."""
    name = part.target.replace(":", ".")
    trial = _Found(roots={name.partition(".")[0]: root})
    module = next((m for m in _prefixes(name) if _module_file(root, m)), "")
    _add_module(module, root, trial, part)
    return Code((), trial.files).digest


def _missing(part: Part, module: str, root: Path) -> Problem:
    parent = module.rpartition(".")[0]
    folder = root.joinpath(*parent.split(".")) if parent else root
    near = sorted(p.stem for p in folder.glob("*") if _module_file(folder, p.stem))
    guess = suggest_match(module.rpartition(".")[2], near)
    name = part.target.replace(":", ".").rpartition(".")[2]
    fix = Fix(f"{target_key(part)}={f'{parent}.{guess}'.lstrip('.')}.{name}") if guess else Fix()
    return Problem(
        target_key(part), part.target, f"{root} has no module {module}", fix, "no_module"
    )


def _add_module(name: str, root: Path, found: _Found, part: Part) -> None:
    """Add a module, its parent packages, and all modules that their texts import."""
    for each in reversed(list(_prefixes(name))):
        if each in found.files:
            continue
        file = _module_file(root, each)
        if file is None:
            return
        if file.is_dir():
            found.files[each] = CodeFile("", hashlib.sha256(b"").hexdigest(), is_package=True)
            continue
        text = _read(file, part)
        is_package = file.name == "__init__.py"
        found.files[each] = CodeFile(str(file), hashlib.sha256(text).hexdigest(), is_package)
        package = each if is_package else each.rpartition(".")[0]
        for imported in _imports(text, file, package, part):
            _add_import(imported, root, found, part)


def _add_import(name: str, root: Path, found: _Found, part: Part) -> None:
    """Add an imported module if it is own code, neither installed nor of the standard library."""
    top = name.partition(".")[0]
    if top not in found.roots:
        if _module_file(root, top) is None:
            return
        place = _environment_place(top)
        if place is not None and place.parent != root:
            unused = _module_file(root, top)
            found.warnings[f"{unused} is not used: the environment has a module {top}"] = None
            return
        found.roots[top] = root
    root = found.roots[top]
    module = next((m for m in _prefixes(name) if _module_file(root, m)), None)
    if module:
        _add_module(module, root, found, part)


def _imports(text: bytes, file: Path, package: str, part: Part) -> Iterator[str]:
    """Yield the absolute names of imported modules, and of names that may be modules."""
    try:
        tree = ast.parse(text, str(file))
    except (SyntaxError, ValueError) as error:
        why = f"{file}:{getattr(error, 'lineno', 1)}: {getattr(error, 'msg', error)}"
        problem = Problem(target_key(part), part.target, why, Fix(remark="correct it"), "own_error")
        raise ConfigError(problem) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _read(file: Path, part: Part) -> bytes:
    """Return the text of a file. ConfigError: It cannot be read, or belongs to another user."""
    why, fix = "", Fix()
    try:
        for place in (file, file.parent):
            if place.stat().st_uid not in (os.getuid(), 0):
                why = f"{place} belongs to another user, whose code would run as yours"
                fix = Fix(remark=f"cp -r {file.parent} .")
        text = file.read_bytes()
    except OSError as error:
        why, text = f"{file}: {error.strerror or error}", b""
    if why:
        raise ConfigError(Problem(target_key(part), part.target, why, fix, "unusable_code"))
    return text


def _module_file(root: Path, name: str) -> Path | None:
    """Return the file of a module in a folder. A folder with Python files is a package, too."""
    place = root.joinpath(*name.split("."))
    for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
        if file.is_file():
            return file
    holds_code = place.is_dir() and place.name.isidentifier()
    return place if holds_code and any((*place.glob("*.py"), *place.glob("*/*.py"))) else None


def _environment_place(top: str) -> Path | None:
    """Return the file or folder of an importable top-level module; importing nothing.

    The current folder and the script's folder, which Python may add to its path, do not count.
    """
    if top in sys.stdlib_module_names:
        return Path(sysconfig.get_path("stdlib")) / top
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    own = {Path.cwd().resolve(), *([Path(main).resolve().parent] if main else [])}
    named = {Path(p).resolve() for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p}
    paths = [
        p for p in sys.path if p and (Path(p).resolve() not in own or Path(p).resolve() in named)
    ]
    for finder in sys.meta_path:
        try:
            if finder is importlib.machinery.PathFinder:
                spec = importlib.machinery.PathFinder.find_spec(top, paths)
            elif isinstance(finder, type):  # of builtin modules, and of editable installations
                spec = finder.find_spec(top, None)
            else:
                continue
        except (ImportError, ValueError, OSError):
            continue
        if spec is None:
            continue
        if spec.origin and spec.has_location:
            file = Path(spec.origin)
            return file.parent if file.name == "__init__.py" else file
        places = list(spec.submodule_search_locations or ())
        if places and any(Path(places[0]).rglob("*.py")):  # not an empty folder on the path
            return Path(places[0])
        if not places:
            return Path(sysconfig.get_path("stdlib")) / top
    return None


def _is_installed(place: Path) -> bool:
    """Return whether a module is in the standard library or in a folder of installed packages."""
    return any(place.resolve().is_relative_to(folder) for folder in _installed_folders())


@cache
def _installed_folders() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()]
    return tuple(dict.fromkeys(Path(folder).resolve() for folder in folders))


@cache
def _distributions() -> dict[str, list[str]]:
    """Return top-level module -> names of the packages that install it."""
    return dict(importlib.metadata.packages_distributions())


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # of the standard library
        return f"Python {sys.version_info.major}.{sys.version_info.minor}"
