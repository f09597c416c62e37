_eke_complete() {
    local each
    local -a program=("${COMP_WORDS[0]/#~\//$HOME/}")
    COMPREPLY=()
    case "${program[0]##*/}" in
        python*)
            # Only eke's own train.py is called; another script might do anything.
            (( COMP_CWORD > 1 )) || return
            program+=("${COMP_WORDS[1]/#~\//$HOME/}")
            command grep -qs 'from eke.cli import main  # shell completion' -- "${program[1]}" || return ;;
    esac
    compopt +o default +o bashdefault 2>/dev/null
    while IFS= read -r each; do
        COMPREPLY+=("${each// /\\ }")
    done < <(COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \
        "${program[@]}" -sc query=bash 2>/dev/null </dev/null)
    # What goes on, and a value behind which a comma may follow, gets no space.
    each="${COMPREPLY[0]-}"
    if [[ ${#COMPREPLY[@]} != 1 || "$each" == *[=./] || "$COMP_LINE" == *" -m "* ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -o default -o bashdefault -F _eke_complete python python3 eke
