"""Shell completion of options, keys, values and flags for bash, zsh and fish.

Nothing is composed, so an unfinished or invalid command line can be completed, in the time of a
Python start.
"""

import itertools
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePath

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.paths import user_path
from eke.config.compose.arguments import INFO_VALUES
from eke.config.compose.catalogue import (
    FIXED_FIELDS,
    GROUPS,
    Catalogue,
    Field,
    class_fields,
    closest,
    headline,
    make_catalogue,
)
from eke.config.schema import Config
from eke.config.schema.fields import field_docs

FLAGS = {
    "--multirun": "several runs, one per value",
    "--config-dir": "a folder with your own options",
    "--cell": "one run of a sweep, with its overrides",
    "--help": "groups and their options; of one group: --help GROUP",
    "--cfg": "print the composed configuration",
    "--info": "how it was composed",
    "--version": "eke's version",
}
"""Completed flags and their descriptions."""

_FLAG_VALUES = {
    ("--cfg", "-c"): ("job", "hydra", "all"),
    ("--info", "-i"): INFO_VALUES,
}
_CONFIG_DIR = ("--config-dir", "-cd")
# These may choose an option of any group, so any option's keys are possible.
_PRESETS = ("recipe", "experiment", "sweep")


@dataclass(frozen=True)
class CompletionItem:
    """A possible completion of the word at the cursor."""

    text: str
    """The whole word; one that ends in `=`, `.` or `/` can continue."""
    about: str = ""
    """Description, for shells that show it."""


def split_line(line: str) -> tuple[list[str], str]:
    """Split into the words before the cursor and the current one (empty after a space)."""
    try:
        words = shlex.split(line)
    except ValueError:  # an open quote, or a trailing backslash
        words = line.replace("'", "").replace('"', "").rstrip("\\").split()
    if not words or (line[-1:].isspace() and line[-2:-1] != "\\"):
        return words, ""
    return words[:-1], words[-1]


def candidates(words: Sequence[str], word: str) -> list[CompletionItem]:
    """List the completions of `word`.

    Args:
        words: the words before it, without the program.
        word: the incomplete word.
    """
    before = words[-1] if words else ""
    if before in _CONFIG_DIR:
        return list(files("", word, folders=True))
    for flags, values in _FLAG_VALUES.items():
        if before in flags:
            return [CompletionItem(value) for value in values if value.startswith(word)]
    if word.startswith("-"):
        return [CompletionItem(f, about) for f, about in FLAGS.items() if f.startswith(word)]
    catalogue = make_catalogue(_config_dir(words))
    key, equals, value = word.partition("=")
    if equals:
        multirun = "-m" in words or "--multirun" in words
        return list(_values(key, value, multirun, catalogue))
    typed = {text.partition("=")[0] for text in words}
    found = _keys(word.rpartition(".")[0], words, catalogue) if "." in word else _starts(catalogue)
    return [c for c in found if c.text.startswith(word) and c.text.removesuffix("=") not in typed]


def _config_dir(words: Sequence[str]) -> Path | None:
    """The user's config folder on the command line, if it exists."""
    folder = ""
    for before, word in itertools.pairwise(["", *words]):
        flag, equals, inline = word.partition("=")
        if before in _CONFIG_DIR:
            folder = word
        elif equals and flag in _CONFIG_DIR:
            folder = inline
    path = user_path(folder)
    return path if folder and path.is_dir() else None


def _starts(catalogue: Catalogue) -> Iterator[CompletionItem]:
    """Groups, sections and keys outside of sections."""
    docs = field_docs(Config)
    for group in catalogue.options:
        yield CompletionItem(f"{group}=", GROUPS.get(group, ""))
    for section in catalogue.sections:
        if catalogue.names(section):
            yield CompletionItem(f"{section}.", f"keys of {section}")
    for key in catalogue.keys:
        if "." not in key:
            yield CompletionItem(f"{key}=", docs.get(key, ""))


def _keys(section: str, words: Sequence[str], catalogue: Catalogue) -> Iterator[CompletionItem]:
    """Keys of a section, for its chosen option."""
    seen = set()
    for cls in _classes(section, words, catalogue):
        docs = field_docs(cls)
        for name, _ in class_fields(cls):
            if name not in FIXED_FIELDS and name not in seen:
                seen.add(name)
                yield CompletionItem(f"{section}.{name}=", docs.get(name, ""))


def _classes(section: str, words: Sequence[str], catalogue: Catalogue) -> Sequence[type]:
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    options = catalogue.options.get(section, {})
    preset = any(pairs.get(group, "none") != "none" for group in _PRESETS)
    default = None if preset else catalogue.defaults.get(section)
    chosen = [o for o in pairs.get(section, default or "").split(",") if o in options]
    if not chosen:
        return catalogue.sections.get(section, ())
    return [catalogue.schema_class(section, option) for option in chosen]


def _values(key: str, value: str, multirun: bool, catalogue: Catalogue) -> Iterator[CompletionItem]:
    """Values of a key or options of a group; with -m, also after a comma."""
    fixed = key.rpartition(".")[2] in FIXED_FIELDS
    field = None if fixed else catalogue.keys.get(key)
    if field is not None and field.kind is str:
        yield from files(f"{key}=", value)
        return
    given, _, part = value.rpartition(",") if multirun else ("", "", value)
    start = f"{key}={given}," if given else f"{key}="
    choices = _choices(key, field, catalogue)
    for choice, about in choices.items():
        if choice.startswith(part) and choice not in given.split(","):
            yield CompletionItem(f"{start}{choice}", about)


def _choices(key: str, field: Field | None, catalogue: Catalogue) -> dict[str, str]:
    if key in catalogue.options:
        files = catalogue.options[key].items()
        return {option: headline(file).partition(" -- ")[2] for option, file in files}
    if field is None:
        return {}
    words: list[str] = []
    if field.kind is bool:
        words = ["true", "false"]
    elif isinstance(field.kind, type) and issubclass(field.kind, Enum):
        words = list(field.kind.__members__)
    # A number has no candidates; shells would insert a single `null` at once.
    return dict.fromkeys([*words, *(["null"] if words and field.optional else [])], "")


def files(start: str, typed: str, folders: bool = False) -> Iterator[CompletionItem]:
    """Files and folders with the given prefix; hidden ones only if it starts with a dot."""
    place, _, name = typed.rpartition("/")
    place += "/" if "/" in typed else ""
    try:
        entries = sorted(os.scandir(os.path.expanduser(place) or "."), key=lambda e: e.name)
    except OSError:  # the folder is missing or unreadable
        return
    for entry in entries:
        hidden = entry.name.startswith(".") and not name.startswith(".")
        if entry.name.startswith(name) and not hidden and (entry.is_dir() or not folders):
            yield CompletionItem(f"{start}{place}{entry.name}{'/' if entry.is_dir() else ''}")


COMPLETION_FLAGS = ("--shell-completion", "-sc")
"""Hydra's completion flags, handled by eke."""

_MARK = "from eke.cli import main  # shell completion"
"""A line that identifies train.py; completion runs no other script."""

_BASH = f"""\
_eke_complete() {{
    local each
    local -a program=("${{COMP_WORDS[0]/#~\\//$HOME/}}")
    COMPREPLY=()
    case "${{program[0]##*/}}" in
        python*)
            # Only eke's own train.py is asked; another script might do anything.
            (( COMP_CWORD > 1 )) || return
            program+=("${{COMP_WORDS[1]/#~\\//$HOME/}}")
            command grep -qs '{_MARK}' -- "${{program[1]}}" || return ;;
    esac
    compopt +o default +o bashdefault 2>/dev/null
    while IFS= read -r each; do
        COMPREPLY+=("${{each// /\\\\ }}")
    done < <(COMP_LINE="${{COMP_LINE:0:COMP_POINT}}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
        "${{program[@]}}" -sc query=bash 2>/dev/null </dev/null)
    # What goes on, and a value behind which a comma may follow, gets no space.
    each="${{COMPREPLY[0]-}}"
    if [[ ${{#COMPREPLY[@]}} != 1 || "$each" == *[=./] || "$COMP_LINE" == *" -m "* ]]; then
        compopt -o nospace 2>/dev/null
    fi
}}
complete -o default -o bashdefault -F _eke_complete python python3 eke
"""

_ZSH = f"""\
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit; }}
_eke() {{
    local -a program found open closed
    program=("${{words[1]/#\\~\\//$HOME/}}")
    if [[ ${{words[1]:t}} == python* ]]; then
        program+=("${{words[2]/#\\~\\//$HOME/}}")
        # Only eke's own train.py is asked; another script might do anything.
        if (( CURRENT < 3 )) || ! command grep -qs '{_MARK}' -- "$program[2]"; then
            ${{_eke_before:-_default}} "$@"
            return
        fi
    fi
    found=(${{(f)"$(COMP_LINE="${{(j: :)words[1,CURRENT-1]}} $PREFIX" \\
        "${{program[@]}}" -sc query=zsh 2>/dev/null </dev/null)"}})
    # What goes on, and a value behind which a comma may follow, gets no space.
    if (( ${{words[(I)-m]}} )); then
        open=($found)
    else
        open=(${{(M)found:#*[=./]}}) closed=(${{found:#*[=./]}})
    fi
    (( $#open )) && compadd -S '' -a open
    (( $#closed )) && compadd -a closed
}}
[[ ${{_comps[python]-}} == _eke ]] || _eke_before=${{_comps[python]-}}
compdef _eke python python3 eke
"""

_FISH = f"""\
function __eke_program
    set -l words (commandline -opc)
    set -l program (string replace -r '^~/' "$HOME/" -- $words[1])
    if string match -q 'python*' -- (basename -- $program)
        # Only eke's own train.py is asked; another script might do anything.
        set -l script (string replace -r '^~/' "$HOME/" -- $words[2])
        command grep -qs '{_MARK}' -- "$script"; or return 1
        set program $program $script
    end
    printf '%s\\n' $program
end
function __eke_complete
    set -lx COMP_LINE (commandline -cp)
    set -l program (__eke_program)
    $program -sc query=fish 2>/dev/null </dev/null
end
for name in python python3
    complete -c $name -n __eke_program -k -f -a '(__eke_complete)'
end
complete -c eke -k -f -a '(__eke_complete)'
"""

_INSTALL = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_UNINSTALL = {
    "bash": "complete -r python python3 eke; unset -f _eke_complete\n",
    "zsh": "compdef -d python python3 eke; unfunction _eke\n",
    "fish": "complete -e -c python; complete -e -c python3; complete -e -c eke\n"
    "functions -e __eke_program __eke_complete\n",
}


def answer_shell(request: Sequence[str], commands: Mapping[str, str] | None = None) -> str:
    """Output of `-sc install=SHELL`, `-sc uninstall=SHELL` or `-sc query=SHELL`.

    Args:
        request: value of the flag; a query reads the command line from COMP_LINE.
        commands: the program's subcommands and their descriptions, if any.

    Raises:
        ConfigError: unknown request or shell.
    """
    action, _, shell = (request[0] if request else "").partition("=")
    if len(request) != 1 or action not in ("install", "uninstall", "query"):
        why = "wants install, uninstall or query, and a shell"
        raise ConfigError(Problem("-sc", " ".join(request), why, Fix(remark="-sc install=bash")))
    if shell not in _INSTALL:
        near = closest(shell, _INSTALL) or "bash"
        why = f"completion is there for {', '.join(_INSTALL)}"
        raise ConfigError(Problem("-sc", request[0], why, Fix(remark=f"-sc {action}={near}")))
    if action == "query":
        line, breaks = os.environ.get("COMP_LINE", ""), os.environ.get("COMP_WORDBREAKS", "")
        return _query(line, breaks, shell, commands or {})
    return (_INSTALL if action == "install" else _UNINSTALL)[shell]


def _query(line: str, breaks: str, shell: str, commands: Mapping[str, str]) -> str:
    words, word = split_line(line)
    left = _without_program(words)
    if commands and not left:
        all_commands = commands.items()
        found = [CompletionItem(c, about) for c, about in all_commands if c.startswith(word)]
    elif commands and left[0] not in ("train", "plan"):
        found = list(files("", word))
    else:
        found = candidates(left[1:] if commands else left, word)
    if shell == "fish":
        return "".join(f"{c.text}\t{c.about}\n" if c.about else f"{c.text}\n" for c in found)
    # bash replaces only the text after its last word break.
    kept = re.match(rf".*[{re.escape(breaks)}]", word) if shell == "bash" and breaks else None
    start = len(kept[0]) if kept else 0
    return "".join(f"{candidate.text[start:]}\n" for candidate in found)


def _without_program(words: Sequence[str]) -> list[str]:
    """Words after `eke`, `python train.py` or `python -m eke.cli`."""
    for number, word in enumerate(words[:3]):
        if PurePath(word).name == "eke" or word.endswith(".py") or word == "eke.cli":
            return list(words[number + 1 :])
    return list(words[1:])
