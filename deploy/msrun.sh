#!/usr/bin/env bash
# Start a training script on this machine with msrun. `msrun.sh --help` says how.
set -euo pipefail

usage() {
  cat <<'USAGE'
Usage: msrun.sh [options] [-- arguments of the training script]

Starts a training script on one node with MindSpore's msrun, one process a rank.

  -n, --workers N    number of ranks                        (WORKERS, default 4)
  -p, --port PORT    msrun's scheduler port                 (MASTER_PORT, default: a free one)
  -l, --log-dir DIR  where msrun keeps worker_N.log         (LOG_DIR, default ./msrun-log)
  -c, --config FILE  training YAML, handed on as --config   (CONFIG, default: example/train.yaml beside this script)
  -s, --script FILE  training script                        (SCRIPT, default: example/train.py beside this script)
  -t, --timeout SEC  how long ranks may take to meet        (CLUSTER_TIME_OUT, default 120)
      --cpu          settings for the CPU build of MindSpore with more ranks than cores (the demo)
  -h, --help         this text

The environment variable in brackets is used where the option is not given. PYTHON names the interpreter.
Example:  msrun.sh --workers 4 --cpu -- --steps 20
USAGE
}

fail() {
  echo "msrun.sh: $1" >&2
  exit 2
}

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
workers="${WORKERS:-4}"
port="${MASTER_PORT:-}"
log_dir="${LOG_DIR:-./msrun-log}"
config="${CONFIG:-$here/example/train.yaml}"
script="${SCRIPT:-$here/example/train.py}"
timeout="${CLUSTER_TIME_OUT:-120}"
cpu=false

while (($#)); do
  case "$1" in
    -n | --workers | -p | --port | -l | --log-dir | -c | --config | -s | --script | -t | --timeout)
      (($# >= 2)) || fail "$1 needs a value; --help lists the options"
      ;;&
    -n | --workers) workers="$2"; shift 2 ;;
    -p | --port) port="$2"; shift 2 ;;
    -l | --log-dir) log_dir="$2"; shift 2 ;;
    -c | --config) config="$2"; shift 2 ;;
    -s | --script) script="$2"; shift 2 ;;
    -t | --timeout) timeout="$2"; shift 2 ;;
    --cpu) cpu=true; shift ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    *) fail "unknown option '$1'; arguments of the training script go after --" ;;
  esac
done

[[ "$workers" =~ ^[1-9][0-9]*$ ]] || fail "--workers must be a positive integer, got '$workers'"
[[ -z "$port" || "$port" =~ ^[1-9][0-9]*$ ]] || fail "--port must be a port number, got '$port'"
[[ -f "$script" ]] || fail "there is no training script '$script'"
[[ -f "$config" ]] || fail "there is no configuration '$config'"

python="$(command -v "${PYTHON:-python}")" || fail "there is no '${PYTHON:-python}'; activate the environment or set PYTHON"
# msrun starts its workers with the `python` it finds in PATH.
PATH="$(dirname "$python"):$PATH"
export PATH

if [[ -z "$port" ]]; then
  # Free now; msrun binds it a moment later. Two jobs that start in the same moment should each be given one.
  port="$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
fi

if "$cpu"; then
  # Without these, MindSpore's waiting threads and one OpenMP pool a rank fight for the cores: 6 to 30 times slower.
  export MS_DEV_LAUNCH_BLOCKING="${MS_DEV_LAUNCH_BLOCKING:-1}"
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fi

mkdir -p "$log_dir"
echo "msrun.sh: $workers ranks, scheduler port $port, logs in $log_dir/worker_N.log" >&2
exec "$python" -m mindspore.parallel.cluster.run \
  --worker_num="$workers" --local_worker_num="$workers" \
  --master_addr=127.0.0.1 --master_port="$port" \
  --join=True --tail_worker_log=0 --cluster_time_out="$timeout" --log_dir="$log_dir" \
  "$script" --config "$config" "$@"
