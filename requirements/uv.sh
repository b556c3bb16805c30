#!/bin/sh
# Runs the environment's uv with the settings pip was given. uv reads none of pip's configuration, so a
# mirror, a folder of wheels or a certificate that pip knows about would otherwise be lost.
#   requirements/uv.sh VENV ARGUMENT...
set -eu
venv=$1
shift

settings=$("$venv/bin/python" -m pip config list 2>/dev/null || true)

# The environment (":env:.") outranks the configuration files ("global.", "install.").
setting() {
  for scope in ':env:' global install; do
    value=$(printf '%s\n' "$settings" | sed -n "s/^$scope\.$1='\(.*\)'\$/\1/p" | head -n 1)
    if [ -n "$value" ]; then
      printf '%s' "$value"
      return
    fi
  done
}

hand_over() { # uv's variable, pip's setting
  eval "present=\${$1:-}"
  [ -z "$present" ] || return 0
  value=$(setting "$2")
  [ -z "$value" ] || export "$1=$value"
}

hand_over UV_DEFAULT_INDEX index-url
hand_over UV_INDEX extra-index-url
hand_over UV_FIND_LINKS find-links
hand_over UV_NO_INDEX no-index
hand_over SSL_CERT_FILE cert
exec "$venv/bin/uv" "$@"
