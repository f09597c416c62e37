"""What a path or a name means where an option was expected: a checkpoint, a file, a data set."""

import re
from itertools import islice
from pathlib import Path

from eke.common.did_you_mean import normal
from eke.common.paths import user_path
from eke.config.schema import ENDINGS

# Endings of files that are no text, and that no option of `data` reads.
_UNREAD = (".tsv", ".xlsx", ".arrow", ".zip", ".tar", ".npy", ".npz", ".bin", ".pkl", ".pt", ".h5")
# Files of a folder that are looked at for their endings.
_MAX_FILES = 1000
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def option_for(typed: str) -> str:
    """The option of `data` that reads a file, or the files of a folder; empty for none."""
    folder = user_path(typed)
    names = [typed]
    if _exists(folder) and folder.is_dir():
        names = sorted(p.name for p in islice(folder.rglob("*.*"), _MAX_FILES))
    for option, endings in ENDINGS.items():
        if any(name.lower().endswith(endings) for name in names):
            return option
    return "" if typed.lower().endswith(_UNREAD) else "text"


def as_data(typed: str) -> tuple[str, ...]:
    """Overrides that train on a file or a folder; on a data set of the hub for a name of one."""
    bare = typed.strip("\"'")
    if not is_file(bare):
        return ("data=hub", f"data.name={typed}")
    option = option_for(bare)
    return (f"data={option}", f"data.path={typed}") if option else ()


def as_evaluation(typed: str) -> tuple[str, ...]:
    """Overrides that evaluate on a file; those of rows alone have a file of their own for that."""
    option = option_for(typed.strip("\"'"))
    if option not in ENDINGS:
        return ()
    return (f"data={option}", "data.path=FILE_OR_FOLDER", f"data.eval_path={typed}")


def is_file(typed: str) -> bool:
    """Whether a text is a file's or a folder's, not `owner/name` or a bare word."""
    if _exists(user_path(typed)) or re.match(r"[./~]|[A-Za-z]:\\|.*/$", typed):
        return True
    suffix = re.search(r"\.[A-Za-z]\w{0,7}$", typed)
    if suffix or "\\" in typed or typed.count("/") > 1 or "*" in typed:
        return True
    return "/" in typed and _exists(user_path(typed.partition("/")[0]))


def as_checkpoint(typed: str) -> tuple[str, ...]:
    """Overrides that train a checkpoint, for a folder, a file in one or a hub's name; else none."""
    bare = typed.strip("\"'")
    named = re.search(r"[-\d]", bare) and re.fullmatch(r"[A-Za-z][\w.-]*", bare)
    if not (named or re.search(r"[/\\]", bare) or _exists(user_path(bare))):
        return ()
    if bare.lower().endswith(_WEIGHTS):
        typed = str(Path(bare).parent)
    return ("model=pretrained", f"model.name_or_path={typed}")


def of_elsewhere(group: str, text: str) -> tuple[str, ...]:
    """Overrides for a checkpoint, a file or a data set that was typed as an option."""
    finders = {"model": as_checkpoint, "data": as_data}
    return finders[group](text) if group in finders else ()


def is_checkpoint(typed: str, near: str) -> bool:
    """Whether a name near to an option of eke's is a hub's: they have dashes, eke's have none.

    gpt2-xl and t5-small are the hub's names of these very sizes; tiny-bert is eke's alone.
    """
    if "-" not in typed:
        return False
    return normal(typed) != normal(near) or near.startswith(("gpt2_", "t5_"))


def same_numbers(typed: str, option: str) -> bool:
    """Whether a name's numbers are an option's too: qwen3_4b is no misspelt qwen3_8b."""
    numbers = re.findall(r"\d+", normal(option))
    return set(re.findall(r"\d+", normal(typed))) <= set(numbers)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, a null character
        return False
