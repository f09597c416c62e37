(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
_eke() {
    local -a program found open closed
    program=("${words[1]/#\~\//$HOME/}")
    if [[ ${words[1]:t} == python* ]]; then
        program+=("${words[2]/#\~\//$HOME/}")
        # Only eke's own train.py is called; another script might do anything.
        if (( CURRENT < 3 )) || ! command grep -qs 'from eke.cli import main  # shell completion' -- "$program[2]"; then
            ${_eke_before:-_default} "$@"
            return
        fi
    fi
    found=(${(f)"$(COMP_LINE="${(j: :)words[1,CURRENT-1]} $PREFIX" \
        "${program[@]}" -sc query=zsh 2>/dev/null </dev/null)"})
    # What goes on, and a value behind which a comma may follow, gets no space.
    if (( ${words[(I)-m]} )); then
        open=($found)
    else
        open=(${(M)found:#*[=./]}) closed=(${found:#*[=./]})
    fi
    (( $#open )) && compadd -S '' -a open
    (( $#closed )) && compadd -a closed
}
[[ ${_comps[python]-} == _eke ]] || _eke_before=${_comps[python]-}
compdef _eke python python3 eke
