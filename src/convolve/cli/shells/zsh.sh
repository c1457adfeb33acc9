#compdef convolve
# zsh completion of convolve @VERSION@, written by `convolve completion zsh`.

typeset -ga __convolve_shared=(
@SHARED@
)

__convolve_options() {
  case $1 in
@OPTIONS@
    *) reply=() ;;
  esac
}

# How many words an option takes (0, 1 or +), and what they are.
__convolve_value() {
  case "$1 $2" in
@SPECIAL_VALUES@
  esac
  case $2 in
@VALUES@
    *) REPLY="0" ;;
  esac
}

__convolve_argument() {
  case "$1 $2" in
@ARGUMENTS@
    *) REPLY="none" ;;
  esac
}

__convolve_add() {
  local kind=$1
  local -a runs
  shift
  case $kind in
    words) compadd -- $@ ;;
    file) _files ;;
    folder) _files -/ ;;
    run)
      runs=(runs/*/@CONFIG_FILE@(N:h))
      compadd -f -- $runs
      _files
      ;;
  esac
}

_convolve() {
  local current=${words[CURRENT]} command="" option="" count="" number=1 index word REPLY
  local -a reply
  for ((index = 2; index < CURRENT; index++)); do
    word=${words[index]}
    if [[ -z $command || $command == bench ]]; then
      command+=${command:+ }$word
    elif [[ $word == "--" && $command == launch ]]; then
      command="" option=""
    elif [[ $word == -*=* ]]; then
      option=""
    elif [[ $word == -* ]]; then
      __convolve_value "$command" "$word"
      option=$word count=${REPLY%% *}
      [[ $count == 0 ]] && option=""
    elif [[ -z $option ]]; then
      ((number++))
    elif [[ $count == 1 ]]; then
      option=""
    fi
  done
  if [[ -z $command ]]; then
    reply=(
@COMMANDS@
    )
    _describe command reply
  elif [[ $command == bench ]]; then
    reply=(
@PARTS@
    )
    _describe part reply
  elif [[ $current == -*=* ]]; then
    __convolve_value "$command" "${current%%=*}"
    compset -P '*='
    __convolve_add ${=REPLY#* }
  elif [[ $current == -* ]]; then
    __convolve_options "$command"
    _describe -o option reply
  elif [[ -n $option ]]; then
    __convolve_value "$command" "$option"
    __convolve_add ${=REPLY#* }
  else
    __convolve_argument "$command" "$number"
    __convolve_add ${=REPLY}
  fi
}

if [[ $funcstack[1] == _convolve ]]; then
  _convolve "$@"
else
  compdef _convolve convolve
fi
