"""Reading of a label column, and numbering of its classes."""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import override
from eke.config.schema import TextColumns
from eke.data.sources import PrepareRequest

VECTORS = "0 or 1 for each class"
"""`Columns.kind` of a column of multi-hot lists."""

_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]{0,17}))(?:\.0*)?")  # 01 and 1 are two texts


def whole(value: Any) -> Any:
    """Return the whole number that a text represents (`1`, pandas' `1.0`), else the value."""
    found = _WHOLE.fullmatch(value.strip()) if isinstance(value, str) else None
    return int(found[1]) if found else value


def is_decimal(item: Any) -> bool:
    """Return whether an item of a list is not written as a class: 1.0, "1.0" or true."""
    return isinstance(item, bool | float) or (whole(item) != item and "." in item)


def reading_of(request: PrepareRequest, labels: Iterable[Any]) -> str:
    """Return the reading of a column: VECTORS, number, name or ""; ConfigError if ambiguous."""
    kinds, sizes = Counter[type](), Counter[int]()
    decimals = twice = 0
    for label in labels:
        items = label if isinstance(label, list) else [label]
        texts = (i for i in items if isinstance(i, str) and i.strip().lower() not in ("", "nan"))
        kinds.update(type(whole(text)) for text in texts)
        if isinstance(label, list):
            bits = [whole(item) for item in items]
            is_binary = all(bit in (0, 1) for bit in bits)
            sizes[len(bits) if is_binary else 0] += 1
            decimals += any(map(is_decimal, items))
            twice += is_binary and len(set(bits)) < len(bits)
    if sizes and request.multi_hot is not False:
        (size, count), total = sizes.most_common(1)[0], sizes.total()
        # Exceptions are allowed up to the limit for bad rows.
        are_alike = size > 1 and total - count <= TextColumns.max_bad_frac * total
        if request.multi_hot or (are_alike and (decimals or twice)) or 2 * decimals > total:
            return VECTORS
        if are_alike:
            why = "has only the lists [0, 1] and [1, 0]: class numbers or multi-hot vectors"
            fix = Fix("data.multi_hot=true", remark="for class numbers data.multi_hot=false")
            problem = Problem("data.label", str(request.label), why, fix, "ambiguous_labels")
            raise ConfigError(problem)
    if not request.is_csv or not kinds:
        return ""
    return "number" if kinds[int] > kinds[str] else "name"


def naming(
    request: PrepareRequest, schema: Mapping[bytes, bytes] | None, given: dict[str, None]
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that replaces class numbers in a row by the names in an Arrow schema.

    The datasets library writes these names. They are added to `given` unless they are numbers
    (`0`, `LABEL_0`).
    """
    names: tuple[str, ...] = ()
    column, typed = str(request.label), request.class_names
    try:
        feature = json.loads((schema or {})[b"huggingface"])["info"]["features"][column]
        while "names" not in feature:  # a list of classes
            feature = feature[0] if isinstance(feature, list) else feature["feature"]
        names = tuple(map(str, feature["names"])) if feature["_type"] == "ClassLabel" else ()
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    are_numbers = all(name in (str(n), f"LABEL_{n}") for n, name in enumerate(names))
    is_renamed = len(names) <= len(typed) and not matched(names, typed)
    if are_numbers or is_renamed or request.problem == "regression":
        return lambda row: row
    given.update(dict.fromkeys(names))

    def named(value: Any) -> Any:
        if isinstance(value, list):
            return [named(item) for item in value]
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else value

    return lambda row: {**row, column: named(row[column])}


def matched(names: Iterable[str], known: Sequence[str]) -> dict[str, int]:
    """Return the index of each name in `known`, also for names that differ only in case."""
    exact = {name: number for number, name in enumerate(known)}
    folded = {name.casefold(): number for name, number in exact.items()}
    if len(folded) < len(exact):
        folded = {}
    found = {name: exact.get(name, folded.get(name.casefold())) for name in names}
    return {name: number for name, number in found.items() if number is not None}


def numbered(
    request: PrepareRequest, given: Collection[str], used: set[str]
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the class names by number, and the numbers of the names that rows use.

    The first source of numbers with all names counts: the checkpoint's head, `task.labels` or
    transformers' default names (`LABEL_0`), the data's own (`given`), the sorted texts. ConfigError
    if the head or `task.labels` lacks a name, or there are too many names.
    """
    head, typed, count = request.head_labels, request.class_names, request.num_labels
    plain = tuple(f"LABEL_{number}" for number in range(count))
    for names in (head, typed or plain):
        numbers = matched(used, names)
        if len(set(numbers.values())) == len(used):
            return (head or names) if names == plain else names, numbers
    order = len if all(map(str.isdecimal, used)) else str  # 2 before 10
    classes = (*given, *sorted(sorted(used - set(given)), key=order))
    if used.isdisjoint(classes[count:]):
        classes = classes[:count]
    size, column = len(classes), str(request.label)
    listed, sized = ", ".join(name[:30] for name in classes[:10]), f"task.num_labels={size}"
    if (known := typed or head) and not request.only_evaluates:
        whose = "task.labels" if typed else "the checkpoint's head"
        why = f"has the classes {listed}, but {whose} has {', '.join(known[:10])}"
        fix = Fix(override("task.labels", list(classes)), *[sized][: size != count])
        raise ConfigError(Problem("data.label", column, why, fix, "other_classes"))
    if size > count:
        why = f"column {column} has {size} different labels: {listed}"
        problem = Problem("task.num_labels", str(count), why, Fix(sized), "too_many_classes")
        raise ConfigError(problem)
    if request.streamed and not given and size < count:
        why = f"has names, and the first rows have only {size} of {count} classes"
        fix = Fix("data.streaming=false", remark="or task.labels=[NAME,NAME]")
        raise ConfigError(Problem("data.label", column, why, fix, "too_few_classes"))
    return classes, matched(used, classes)
