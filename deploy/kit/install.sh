#!/bin/sh
# Sets up one machine of this kit, without a network:
#   ./install.sh MACHINE [--dry-run] [--fingerprint SHA256] [more options of `baru-hub kit install`]
# It needs Python 3.10 or later, openssl and coreutils. BARU_PYTHON names another Python.
set -eu
umask 022

bundle=$(cd "$(dirname "$0")" && pwd)
machine=${1:-}
part=$bundle/machines/$machine
if [ -z "$machine" ] || [ ! -f "$part/machine.json" ]; then
    echo "error: name the machine: $(cd "$bundle/machines" && echo *)" >&2
    exit 1
fi
shift

# Nothing of the bundle runs before it is what the kit's authority has signed.
checked() {
    key=$(mktemp)
    openssl x509 -in "$1/ca.pem" -noout -pubkey >"$key"
    openssl dgst -sha256 -verify "$key" -signature "$1/SHA256SUMS.sig" "$1/SHA256SUMS" >/dev/null ||
        { echo "error: $1 is not what its authority signed: copy the bundle again" >&2; rm -f "$key"; exit 1; }
    rm -f "$key"
    (cd "$1" && sha256sum --check --quiet --strict SHA256SUMS) || exit 1
}
checked "$bundle"
checked "$part"

release=$(cat "$part/release")
to=/opt/baru/releases/$release
case " $* " in *" --dry-run "*)
    to=$(mktemp -d)
    trap 'rm -rf "$to"' EXIT
    ;;
esac
if [ ! -e "$to/.complete" ]; then
    echo "installing release $release" >&2
    rm -rf "$to"
    # Debian's Python has no pip of its own: the one that is in the bundle runs from its wheel.
    "${BARU_PYTHON:-python3}" -m venv --without-pip "$to"
    for pip in "$bundle"/wheels/pip-*.whl; do :; done
    "$to/bin/python" "$pip/pip" install --quiet --no-index --no-deps --require-hashes --disable-pip-version-check \
        --find-links "$bundle/wheels" --requirement "$part/requirements.txt"
    touch "$to/.complete"
fi
"$to/bin/baru-hub" kit install "$machine" --from "$bundle" "$@"
