# fish completion of convolve @VERSION@, written by `convolve completion fish`.

set -g __convolve_shared @SHARED@

function __convolve_options
    switch $argv[1]
@OPTIONS@
    end
end

# How many words an option takes (0, 1 or +), and what they are.
function __convolve_value
    switch "$argv[1] $argv[2]"
@SPECIAL_VALUES@
    end
    switch $argv[2]
@VALUES@
        case '*'
            echo 0
    end
end

function __convolve_argument
    switch "$argv[1] $argv[2]"
@ARGUMENTS@
        case '*'
            echo none
    end
end

function __convolve_add
    switch $argv[2]
        case words
            printf '%s\n' $argv[3..]
        case file
            __fish_complete_path $argv[1]
        case folder
            __fish_complete_directories $argv[1] ''
        case run
            for folder in runs/*/
                test -e $folder@CONFIG_FILE@; and printf '%s\trun\n' (string trim -r -c / $folder)
            end
            __fish_complete_path $argv[1]
    end
end

function __convolve_complete
    set -l current (commandline -ct)
    set -l command ''
    set -l option ''
    set -l count ''
    set -l number 1
    for word in (commandline -opc)[2..]
        if test -z "$command" -o "$command" = bench
            set command (string trim "$command $word")
        else if test "$word" = -- -a "$command" = launch
            set command ''
            set option ''
        else if string match -q -- '-*=*' $word
            set option ''
        else if string match -q -- '-*' $word
            set -l value (string split ' ' (__convolve_value $command $word))
            set option $word
            set count $value[1]
            test "$count" = 0; and set option ''
        else if test -z "$option"
            set number (math $number + 1)
        else if test "$count" = 1
            set option ''
        end
    end
    if test -z "$command"
        printf '%s\n' @COMMANDS@
    else if test "$command" = bench
        printf '%s\n' @PARTS@
    else if string match -q -- '-*=*' $current
        set -l parts (string split -m 1 = -- $current)
        set -l value (string split ' ' (__convolve_value $command $parts[1]))
        printf "$parts[1]=%s\n" (__convolve_add $parts[2] $value[2..])
    else if string match -q -- '-*' $current
        __convolve_options $command
    else if test -n "$option"
        set -l value (string split ' ' (__convolve_value $command $option))
        __convolve_add "$current" $value[2..]
    else
        __convolve_add "$current" (string split ' ' (__convolve_argument $command $number))
    end
end

complete -c convolve -f -a '(__convolve_complete)'
