"""Resources that are states of the persistent shell. Each has variables, functions and files of its own names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShellResource:
    """Commands of the persistent shell: `probe` prints the state, `use` fails when it does not work."""

    setup: str
    probe: str
    damage: str
    use: str = "true"
    level: str = "fs+shell"
    group: str = "main"


SHELLS = {
    "shell: folder": ShellResource(
        "mkdir -p '/srv/a b/ü' && cd '/srv/a b/ü' && pushd /tmp >/dev/null && popd >/dev/null && cd ../ü",
        'echo "$PWD $OLDPWD"; pwd -P',
        "cd /; rm -rf '/srv/a b'",
        "echo x >> here && test -s '/srv/a b/ü/here'",
    ),
    "shell: variables": ShellResource(
        "export c_exported=$'two\\nlines \\001'; c_plain='x  y'; c_list=(1 'two words' '');"
        " declare -A c_map=([k]=v [ä]=ö);"
        " declare -i c_number=41; declare -r c_fixed=always; c_turn=0",
        'declare -p c_exported c_plain c_list c_map c_number c_fixed c_turn; env | grep -c "^c_exported="',
        "unset c_exported c_plain c_list c_map c_number c_turn",
        "c_turn=$((c_turn+1)); c_list+=($c_turn)",
        level="full",
    ),
    "shell: exported variables": ShellResource(
        "export e_one='x  y' e_two=$'\\ttab' e_three=",
        "declare -p e_one e_two e_three",
        "unset e_one e_two e_three",
        'export e_one="$e_one+"',
    ),
    "shell: functions": ShellResource(
        'f_greet() { local who=${1:-nobody}; echo "hello $who from ${FUNCNAME[0]}"; }; f_count() { f_n=$((f_n+1)); }',
        "declare -f f_greet f_count; f_greet you",
        "unset -f f_greet f_count",
        "f_count && f_count",
    ),
    "shell: aliases and options": ShellResource(
        "alias a_ll='ls -l'; shopt -s extglob nullglob expand_aliases; set -o noclobber; umask 027; ulimit -S -n 999",
        "alias a_ll; shopt extglob nullglob; set +o | grep noclobber; umask; ulimit -n; echo $-",
        "unalias a_ll; shopt -u extglob; set +o noclobber; umask 0",
        level="full",
    ),
    "shell: traps": ShellResource(
        "t_seen=0; trap 't_seen=$((t_seen+1))' USR1; trap 'echo bye' EXIT; trap '' USR2",
        "trap -p USR1 USR2 EXIT; echo $t_seen",
        "trap - USR1 USR2 EXIT",
        "t_before=$t_seen; kill -USR1 $$; kill -USR2 $$; sleep 0.01; test $t_seen = $((t_before+1))",
        level="full",
    ),
    "shell: jobs": ShellResource(
        "(n=0; while sleep 0.05; do n=$((n+1)); echo $n >| /tmp/j_count; done) & j_loop=$!; sleep 9876 & j_sleep=$!;"
        " sleep 8765 & j_stopped=$!; kill -STOP $j_stopped; sleep 0.02",
        "echo $j_loop $j_sleep $j_stopped; jobs -l | tr -s ' ' | cut -d' ' -f1-3; ps -o pid=,ppid=,stat= -p $j_sleep",
        "kill -9 $j_loop $j_sleep $j_stopped",
        "j_before=$(cat /tmp/j_count); for i in $(seq 100); do sleep 0.02;"
        " test $(cat /tmp/j_count) -gt $j_before && break; done; test $(cat /tmp/j_count) -gt $j_before &&"
        " kill -0 $j_sleep && kill -CONT $j_stopped &&"
        " kill -STOP $j_stopped && sleep 0.02",
        level="full",
    ),
    "shell: descriptors": ShellResource(
        "exec 7<>/tmp/d_file; echo text >&7; exec 8< <(echo one; echo two; sleep 7654); read -r d_first <&8;"
        ' coproc d_echo { while read -r line; do echo "<$line>"; done; }',
        "readlink /proc/$$/fd/7; echo $d_first ${d_echo[@]} $d_echo_PID",
        "exec 7>&- 8<&-; rm -f /tmp/d_file; kill -9 $d_echo_PID",
        "echo more >&7; echo ask >&${d_echo[1]}; read -r d_answer <&${d_echo[0]}; test \"$d_answer\" = '<ask>'",
        level="full",
    ),
}
