# Completion of amem for bash (3.2 or later), made by `python -m tools`.

_amem() {
    local cur='' word path='' value='' ended='' offered prefix
    local -a words=()
    local -i i place=0
    for ((i = 0; i <= COMP_CWORD; i++)); do # readline parts words at @, = and :
        word=${COMP_WORDS[i]}
        if ((i)) && [[ -n $word && ($word == [@=:]* || ${COMP_WORDS[i - 1]} == *[@=:]) ]]; then
            words[${#words[@]} - 1]+=$word
        else
            words+=("$word")
        fi
    done
    for ((i = 1; i < ${#words[@]} - 1; i++)); do
        word=${words[i]}
        if [[ -n $value ]]; then
            value=''
        elif [[ -z $ended && $word == -- ]]; then
            ended=yes
        elif [[ -z $ended && $word == -?* ]]; then
            [[ $word == *=* ]] || ! _amem_value "$path" "$word" >/dev/null || value=$word
        elif ((place == 0)) && _amem_options "${path:+$path }$word" >/dev/null; then
            path=${path:+$path }$word
        else
            place+=1
        fi
    done
    cur=${words[${#words[@]} - 1]}
    prefix=${cur%"$2"} # what readline leaves in place
    if [[ -n $value ]]; then
        offered=$(_amem_value "$path" "$value")
    elif [[ -z $ended && $cur == --*=* ]]; then
        offered=$(_amem_value "$path" "${cur%%=*}")
        prefix=${prefix#*=}
        cur=${cur#*=}
    elif [[ -z $ended && $cur == -* ]]; then
        offered="words $(_amem_options "$path")"
    else
        offered=$(_amem_argument "$path" "$place")
    fi
    _amem_offer
}

# Fill COMPREPLY with what is offered and begins as the word does. Where nothing is found bash offers files itself.
_amem_offer() {
    local candidate
    local -a typed
    COMPREPLY=()
    [[ $offered == files ]] && return
    compopt +o default 2>/dev/null
    case $offered in
        folders) compopt -o dirnames 2>/dev/null; return ;;
        words*) offered=${offered#words} ;;
        names*)
            typed=("${words[@]:1:${#words[@]}-2}")
            offered=$("${words[0]/#\~/$HOME}" __complete "${offered#names }" "${typed[@]//[\"\'\\]/}" "$cur" 2>/dev/null)
            ;;
    esac
    for candidate in $offered; do
        [[ $candidate == "$cur"* ]] && COMPREPLY+=("${candidate#"$prefix"}")
    done
}

# What may follow the option $2 of the command $1; fails where it takes no value.
_amem_value() {
    case "$1 $2" in
        'prefill --system' | 'prefill --wait' | 'chat --max-tokens' | 'chat --temp' | 'chat --top-p' | 'chat --seed' | 'chat --stop' | 'chat --expect' | 'chat --wait' | 'extend --phase' | 'extend --expect' | 'extend --wait' | 'snapshot --note' | 'restore --expect' | 'restore --wait' | 'restore --note' | 'fork --note' | 'log -n' | 'log --number' | 'log --since' | 'log --until' | 'rm --wait' | 'gc --max-bytes' | 'gc --older-than' | 'gc --keep-history' | 'verify --journal-head' | 'repair --wait' | 'batch --memory' | 'import --wait' | 'model plan --memory' | 'model plan --context' | 'model plan --agents' | 'demo --tokens') echo '' ;;
        'prefill --system-file' | 'chat -f' | 'chat --file' | 'verify --erased' | 'verify --sums' | 'export -o' | 'export --output' | 'import --tokens') echo files ;;
        ' --store' | 'prefill --store' | 'chat --store' | 'extend --store' | 'snapshot --store' | 'restore --store' | 'fork --store' | 'inspect --store' | 'log --store' | 'diff --store' | 'rm --store' | 'gc --store' | 'verify --store' | 'repair --store' | 'batch --store' | 'export --store' | 'import --store' | 'model --store' | 'model add --adapter' | 'model add --store' | 'model ls --store' | 'model rm --store' | 'model check --store' | 'model plan --store' | 'doctor --store' | 'demo --dir' | 'demo --store') echo folders ;;
        'prefill --domain' | 'inspect --domain' | 'rm --domain' | 'import --domain') echo 'names domains' ;;
        'prefill --model' | 'chat --model' | 'extend --model' | 'repair --model' | 'batch --model' | 'import --model') echo 'names models' ;;
        'export --format' | 'import --format') echo 'words amem mlx-lm' ;;
        'prefill --codec') echo 'words q4-sink q4-channel q8-channel q4-token q8-token' ;;
        'prefill --role' | 'extend --role') echo 'words user assistant' ;;
        *) return 1 ;;
    esac
}

# What the command $1 takes at place $2, from 0.
_amem_argument() {
    case "$1 $2" in
        'chat '1 | 'snapshot '1 | 'fork '1 | 'import '1 | 'model add '0) echo '' ;;
        'batch '0 | 'import '0 | 'model add '1) echo files ;;
        'prefill '0 | 'extend '0 | 'log '0) echo 'names agents' ;;
        'model rm '0 | 'model check '0 | 'model plan '0) echo 'names models' ;;
        'chat '0 | 'snapshot '0 | 'restore '0 | 'fork '0 | 'inspect '0 | 'diff '0 | 'diff '1 | 'repair '0 | 'export '0) echo 'names refs' ;;
        'model '0) echo 'words add ls rm check plan' ;;
        ' '0) echo 'words prefill chat extend snapshot restore fork inspect log diff rm gc verify repair batch export import model doctor demo' ;;
        'prefill '* | 'extend '*) echo files ;;
        'verify '*) echo 'names agents' ;;
        'rm '*) echo 'names refs' ;;
    esac
}

# The options of the command $1; fails where there is no such command.
_amem_options() {
    case $1 in
        'model add') echo '--adapter --store --json -q --quiet -v --verbose --no-color --help' ;;
        demo) echo '--dir --tokens --store --json -q --quiet -v --verbose --no-color --help' ;;
        import) echo '--domain --as-new --format --model --tokens --wait --store --json -q --quiet -v --verbose --no-color --help' ;;
        rm) echo '--domain --erase --dry-run --wait --store --json -q --quiet -v --verbose --no-color --help' ;;
        inspect) echo '--domain --text --raw --store --json -q --quiet -v --verbose --no-color --help' ;;
        gc) echo '--dry-run --max-bytes --older-than --keep-history --store --json -q --quiet -v --verbose --no-color --help' ;;
        restore) echo '--expect --wait --note --store --json -q --quiet -v --verbose --no-color --help' ;;
        'model plan') echo '--memory --context --agents --store --json -q --quiet -v --verbose --no-color --help' ;;
        batch) echo '--memory --no-batch --model --store --json -q --quiet -v --verbose --no-color --help' ;;
        prefill) echo '--model --system --system-file --role --raw --domain --replace --codec --wait --store --json -q --quiet -v --verbose --no-color --help' ;;
        repair) echo '--model --wait --store --json -q --quiet -v --verbose --no-color --help' ;;
        snapshot | fork) echo '--note --store --json -q --quiet -v --verbose --no-color --help' ;;
        verify) echo '--quick --deep --isolation --journal --journal-head --erased --sums --store --json -q --quiet -v --verbose --no-color --help' ;;
        extend) echo '--role --raw --phase --expect --wait --model --store --json -q --quiet -v --verbose --no-color --help' ;;
        model | 'model ls' | 'model rm' | 'model check' | doctor) echo '--store --json -q --quiet -v --verbose --no-color --help' ;;
        diff) echo '--text --store --json -q --quiet -v --verbose --no-color --help' ;;
        '') echo '--version --store --json -q --quiet -v --verbose --no-color --help' ;;
        chat) echo '-f --file --max-tokens --temp --top-p --seed --stop --no-save --expect --wait --model --store --json -q --quiet -v --verbose --no-color --help' ;;
        log) echo '-n --number --graph --text --since --until --head --store --json -q --quiet -v --verbose --no-color --help' ;;
        export) echo '-o --output --lineage --format --store --json -q --quiet -v --verbose --no-color --help' ;;
        *) return 1 ;;
    esac
}

complete -o default -F _amem amem
