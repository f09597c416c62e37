"""The scripts that make bash, zsh and fish ask eke, and the answers as each shell reads them."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from eke.common.errors import ConfigError, Problem
from eke.config.compose.completion import Candidate, candidates, files, split_line
from eke.config.compose.formatting import closest

COMPLETION_FLAGS = ("--shell-completion", "-sc")
"""Hydra's flags, with eke's answer."""

_MARK = (
    "from eke.workflows import main"  # a line of train.py: no other script is ever run to complete
)

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
    """The answer to `-sc install=SHELL`, `-sc uninstall=SHELL` or `-sc query=SHELL`.

    Args:
        request: what follows the flag; a query's command line is in the environment's COMP_LINE.
        commands: the commands of a program that has some, and what each is for.

    Raises:
        ConfigError: another request, or a shell that is not known.
    """
    action, _, shell = (request[0] if request else "").partition("=")
    if len(request) != 1 or action not in ("install", "uninstall", "query"):
        why = "wants install, uninstall or query, and a shell"
        raise ConfigError(Problem("-sc", " ".join(request), why, "-sc install=bash"))
    if shell not in _INSTALL:
        near = closest(shell, _INSTALL) or "bash"
        why = f"completion is there for {', '.join(_INSTALL)}"
        raise ConfigError(Problem("-sc", request[0], why, f"-sc {action}={near}"))
    if action == "query":
        line, breaks = os.environ.get("COMP_LINE", ""), os.environ.get("COMP_WORDBREAKS", "")
        return _query(line, breaks, shell, commands or {})
    return (_INSTALL if action == "install" else _UNINSTALL)[shell]


def _query(line: str, breaks: str, shell: str, commands: Mapping[str, str]) -> str:
    words, word = split_line(line)
    left = _without_program(words)
    if commands and not left:
        all_commands = commands.items()
        found = [Candidate(c, about) for c, about in all_commands if c.startswith(word)]
    elif commands and left[0] not in ("train", "plan"):
        found = list(files("", word))
    else:
        found = candidates(left[1:] if commands else left, word)
    if shell == "fish":
        return "".join(f"{c.text}\t{c.about}\n" if c.about else f"{c.text}\n" for c in found)
    # bash replaces only what follows the last of its word breaks.
    kept = re.match(rf".*[{re.escape(breaks)}]", word) if shell == "bash" and breaks else None
    start = len(kept[0]) if kept else 0
    return "".join(f"{candidate.text[start:]}\n" for candidate in found)


def _without_program(words: Sequence[str]) -> list[str]:
    """What follows `eke`, `python train.py` or `python -m eke.cli`."""
    for number, word in enumerate(words[:3]):
        if PurePath(word).name == "eke" or word.endswith(".py") or word == "eke.cli":
            return list(words[number + 1 :])
    return list(words[1:])
