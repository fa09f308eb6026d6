#!/bin/sh
# Run the arguments with a Python that can make edge_rt's venv: $PYTHON, else the first on PATH that is new enough.
set -eu

works() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    works "$PYTHON" || { echo "edge_rt: PYTHON=$PYTHON is not a Python 3.11 or newer" >&2; exit 1; }
    exec "$PYTHON" "$@"
fi
for python in python3 python3.14 python3.13 python3.12 python3.11 python; do
    if works "$python"; then
        exec "$python" "$@"
    fi
done
found=$(python3 --version 2>&1) || found="no python3"
echo "edge_rt needs Python 3.11 or newer, this machine's PATH has: $found." >&2
echo "Install one (Debian, Ubuntu: apt install python3 python3-venv) or name it: make PYTHON=/path/to/python3.11" >&2
exit 1
