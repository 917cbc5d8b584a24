#!/usr/bin/env bash
# Run the tests in two pytest processes at once: those with engines, one engine test at a time, and next to them all
# others, which mostly wait and are shown when they have ended.
#   scripts/run_tests.sh PYTHON [PYTEST ARGUMENTS]
set -uo pipefail
python=${1:?usage: run_tests.sh PYTHON [PYTEST ARGUMENTS]}
shift
NO_TESTS=5 # pytest's exit status where nothing was selected
log=$(mktemp)
trap 'kill "$rest" 2>/dev/null; wait "$rest"; rm -f "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

"$python" -m pytest --part rest "$@" >"$log" 2>&1 </dev/null &
rest=$!
"$python" -m pytest --part engine "$@"
engine_status=$?
wait "$rest"
rest_status=$?
printf '\nThe tests without an engine, which ran at the same time:\n\n'
cat "$log"

for status in "$engine_status" "$rest_status"; do
    [ "$status" -eq 0 ] || [ "$status" -eq "$NO_TESTS" ] || exit "$status"
done
[ "$engine_status" -eq 0 ] || [ "$rest_status" -eq 0 ] || exit "$NO_TESTS"
