# bash completion of convolve @VERSION@, written by `convolve completion bash`.

__convolve_shared="@SHARED@"

__convolve_options() {
  case $1 in
@OPTIONS@
    *) REPLY="" ;;
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
  local current=$1 kind=$2 folder
  shift 2
  case $kind in
    words) mapfile -t COMPREPLY < <(compgen -W "$*" -- "$current") ;;
    file) mapfile -t COMPREPLY < <(compgen -f -- "$current") ;;
    folder) mapfile -t COMPREPLY < <(compgen -d -- "$current") ;;
    run)
      for folder in runs/*/ "$current"*/; do
        folder=${folder%/}
        [[ -e $folder/@CONFIG_FILE@ && $folder == "$current"* && " ${COMPREPLY[*]} " != *" $folder "* ]] && COMPREPLY+=("$folder")
      done
      ((${#COMPREPLY[@]})) || mapfile -t COMPREPLY < <(compgen -f -- "$current")
      ;;
  esac
  [[ $kind == words ]] || compopt -o filenames 2> /dev/null
}

_convolve() {
  local current=${COMP_WORDS[COMP_CWORD]} command="" option="" count="" number=1 index word REPLY
  COMPREPLY=()
  [[ $current == "=" ]] && current=""
  for ((index = 1; index < COMP_CWORD; index++)); do
    word=${COMP_WORDS[index]}
    if [[ -z $command || $command == bench ]]; then
      command+=${command:+ }$word
    elif [[ $word == "--" && $command == launch ]]; then
      command="" option=""
    elif [[ $word == -* ]]; then
      __convolve_value "$command" "$word"
      option=$word count=${REPLY%% *}
      [[ $count == 0 ]] && option=""
    elif [[ $word != "=" ]]; then
      if [[ -z $option ]]; then ((number++)); elif [[ $count == 1 ]]; then option=""; fi
    fi
  done
  if [[ -z $command ]]; then
    __convolve_add "$current" words "@COMMANDS@"
  elif [[ $command == bench ]]; then
    __convolve_add "$current" words "@PARTS@"
  elif [[ $current == -* ]]; then
    __convolve_options "$command"
    __convolve_add "$current" words "$REPLY"
  elif [[ -n $option ]]; then
    __convolve_value "$command" "$option"
    __convolve_add "$current" ${REPLY#* }
  else
    __convolve_argument "$command" "$number"
    __convolve_add "$current" $REPLY
  fi
}

complete -F _convolve convolve
