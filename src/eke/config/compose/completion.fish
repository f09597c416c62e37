function __eke_program
    set -l words (commandline -opc)
    set -l program (string replace -r '^~/' "$HOME/" -- $words[1])
    if string match -q 'python*' -- (basename -- $program)
        # Only eke's own train.py is called; another script might do anything.
        set -l script (string replace -r '^~/' "$HOME/" -- $words[2])
        command grep -qs 'from eke.cli import main  # shell completion' -- "$script"; or return 1
        set program $program $script
    end
    printf '%s\n' $program
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
