"""Did you mean ...: the real key or group nearest to an unknown one."""

from collections.abc import Sequence

from eke.common.paths import program
from eke.config.compose.catalogue import FIXED_FIELDS, Catalogue, class_fields
from eke.config.compose.formatting import closest
from eke.config.compose.values import default_text
from eke.config.schema import VARIANTS

# The key a bare number or text was meant for when it was given to a whole group.
_NUMBER_KEY = {
    "batch": "per_device",
    "data": "num_samples",
    "dataloader": "workers",
    "distributed": "num_processes",
    "optimizer": "lr",
    "schedule": "warmup_steps",
    "train": "steps",
}
_TEXT_KEY = {"paths": "runs"}


def number_key(section: str) -> str | None:
    """`batch=4` means `batch.per_device=4`: the key path for a number given to a whole section."""
    return f"{section}.{_NUMBER_KEY[section]}" if section in _NUMBER_KEY else None


def text_key(section: str) -> str | None:
    """`paths=/data` means `paths.runs=/data`."""
    return f"{section}.{_TEXT_KEY[section]}" if section in _TEXT_KEY else None


def nearest_key(key: str, catalogue: Catalogue) -> str | None:
    """The key path, section or group that was probably meant by an unknown `key`."""
    key = key.strip("./").replace("/", ".")
    section, _, name = key.rpartition(".")
    if section:
        return _nearest_nested(section, name, catalogue)
    if named_so(name, catalogue):
        return _by_name(name, catalogue)
    roots = [path for path in catalogue.keys if "." not in path]
    near = closest(name, [*catalogue.options, *catalogue.sections, *roots])
    if near:
        return near
    near = closest(name, [path.rpartition(".")[2] for path in _typable(catalogue)])
    return _by_name(near, catalogue) if near else None


def _nearest_nested(section: str, name: str, catalogue: Catalogue) -> str | None:
    """`optimizer.momentm`, `optimizr.lr`, `trainer.steps`: mend the part that is wrong."""
    if section in catalogue.keys:
        return section
    if section in catalogue.sections:
        near = closest(name, catalogue.names(section))
        other = name if name in catalogue.options else _by_name(name, catalogue)
        return f"{section}.{near}" if near else other
    near_section = closest(section, catalogue.sections)
    if near_section:
        near = closest(name, catalogue.names(near_section))
        if near:
            return f"{near_section}.{near}"
    return _by_name(name, catalogue) or closest(f"{section}.{name}", _typable(catalogue))


def _by_name(name: str, catalogue: Catalogue) -> str | None:
    """The key path whose last part is `name`, where there is only one."""
    paths = named_so(name, catalogue)
    return paths[0] if len(paths) == 1 else None


def named_so(name: str, catalogue: Catalogue) -> list[str]:
    """Every key path whose last part is `name`, in the order of the schema."""
    return [k for k in _typable(catalogue) if k.rpartition(".")[2] == name]


def nothing_near(key: str, catalogue: Catalogue) -> str:
    """What there is, for a key that is no misspelt one."""
    section, _, name = key.rpartition(".")
    if several := named_so(name, catalogue):
        return f"there is no such key; {' and '.join(several)} are"
    if section in catalogue.sections:
        return f"there is no such key; {section} has {', '.join(catalogue.names(section))}"
    return f"there is no such key or group; `{program()} --help` lists them"


def likeliest(section: str, option: str, others: Sequence[str], catalogue: Catalogue) -> str:
    """Of options with a wanted key: the default, one called like the present, the simplest."""
    return min(
        others,
        key=lambda other: (
            other != catalogue.defaults.get(section),
            not other.startswith(option),
            len(class_fields(catalogue.schema_class(section, other))),
            other not in VARIANTS[section],
            other,
        ),
    )


def _typable(catalogue: Catalogue) -> list[str]:
    return [k for k in catalogue.keys if k.rpartition(".")[2] not in FIXED_FIELDS]


def completed(name: str, catalogue: Catalogue) -> str | None:
    """A whole override for a name typed without a value: its default, true for a switch."""
    if name in catalogue.options:
        return f"{name}={catalogue.defaults.get(name, next(iter(catalogue.options[name])))}"
    if name in catalogue.keys:
        field = catalogue.keys[name]
        return f"{name}={'true' if field.kind is bool else default_text(field, name)}"
    if name in catalogue.sections:
        return completed(f"{name}.{catalogue.names(name)[0]}", catalogue)
    return next(
        (f"{g}={name}" for g, options in catalogue.options.items() if name in options), None
    )
