# shellcheck shell=bash
# What setup, with-erlang and the Makefile must agree on: where the cache is, which flavours of Erlang and RabbitMQ
# exist, and how to recognise one that is ready. Sourced, never run.

# Raise it when the content of a root folder changes: older folders are then built anew.
RECIPE=1

# Outside the checkout, so that `git clean` and a second checkout do not cost another download of a gigabyte.
CACHE=${STREAM_S3_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/rabbitmq_stream_s3}
export STREAM_S3_CACHE=$CACHE

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

root_of() { printf '%s/roots/%s\n' "$CACHE" "$1"; }

# Where the Python client of the stream protocol for a flavour is, once .ci/stream-client has put it there.
RSTREAM_VERSION=1.1.1
rstream_of() { printf '%s/rstream-%s-%s\n' "$CACHE" "$RSTREAM_VERSION" "$1"; }

# Where the server of Prometheus for a flavour is, once .ci/prometheus has put it there.
prometheus_of() { printf '%s/prometheus-%s\n' "$CACHE" "$1"; }

root_is_ready() {
    local stamp
    stamp="$(root_of "$1")/.recipe"
    [[ -r $stamp && $(<"$stamp") == "$RECIPE" ]]
}

# The RabbitMQ folder below a root ('' is this machine): the one with plugins/ in it.
rabbitmq_home_in() {
    local dir
    for dir in "$1"/usr/lib/rabbitmq/lib/rabbitmq_server-4*; do
        [[ -d $dir/plugins ]] && printf '%s\n' "${dir#"$1"}" && return 0
    done
    return 1
}

# The OTP release of the erl on the PATH. Read from its files, because starting a VM takes longer than all else here.
host_otp() {
    local erl release
    erl=$(command -v erl) || return 1
    release=$(dirname "$(readlink -f "$erl")")/../releases/start_erl.data
    if [[ -r $release ]]; then
        awk '{ print $2; exit }' "$release"
    else # a shim of a version manager
        erl -noshell -eval 'io:put_chars(erlang:system_info(otp_release)), halt().' 2>/dev/null
    fi
}

# True when this machine's own Erlang and RabbitMQ serve; HOST_RABBITMQ_HOME is set then. Says why not, if one is there
# and cannot be used, with `explain` as argument.
host_is_usable() {
    local otp explain=${1:-}
    HOST_RABBITMQ_HOME=${RABBITMQ_HOME:-$(rabbitmq_home_in '' || true)}
    otp=$(host_otp || true)
    otp=${otp%%.*}
    if [[ -z $otp || -z $HOST_RABBITMQ_HOME ]]; then
        return 1
    elif [[ ! $otp =~ ^[0-9]+$ ]] || ((otp < 26)); then
        [[ -z $explain ]] || say "note: Erlang/OTP $otp of this machine is older than 26, so it is not used"
        return 1
    elif ! compgen -G "$HOST_RABBITMQ_HOME/plugins/rabbit-4.*" >/dev/null; then
        [[ -z $explain ]] || say "note: there is no RabbitMQ 4 in $HOST_RABBITMQ_HOME/plugins, so it is not used"
        return 1
    elif ! command -v rebar3 >/dev/null; then
        [[ -z $explain ]] || say "note: this machine's Erlang and RabbitMQ would do, but rebar3 is not on the PATH"
        return 1
    fi
}

# Free kilobytes where DIR, or its nearest existing parent, lies.
free_kb() {
    local dir=$1
    while [[ ! -d $dir ]]; do dir=$(dirname "$dir"); done
    df --output=avail -k "$dir" | tail -n 1 | tr -d ' '
}
