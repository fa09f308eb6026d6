#!/bin/sh
# Install the system packages whose commands are missing: sh tools/system_packages.sh COMMAND=PACKAGE ...
# As root, with apt-get; elsewhere it says what is missing, and the tests that need it skip with the reason.
set -u
missing=
for pair; do
    command -v "${pair%%=*}" >/dev/null || missing="$missing ${pair#*=}"
done
[ -n "$missing" ] || exit 0
install() {
    # shellcheck disable=SC2086 # one word a package
    apt-get install -y -q --no-install-recommends $missing
}
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    install || { apt-get update -q && install; } && exit 0
fi
echo "not installed, so what needs them is skipped:$missing"
