#!/usr/bin/env bash
# Runs the bundled tests and the CLI on this machine's GPU; with "bench", the benchmarks too.
# Without a GPU it fails: a test that needs one does not pass by being left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export DSV4_REQUIRE_GPU=1 DSV4_GOLDEN_DIR="$PWD/golden"
export DSV4_E2E_DIR="${DSV4_E2E_DIR:-$PWD/e2e}"

for test in tests/*; do
    echo "== $test"
    "$test"
done

echo "== random operations against a model on the GPU"
bin/stress --device cuda --ops 1000 --seeds 4

echo "== replay on the GPU"
bin/dsv4-kv replay --device cuda

if [[ "${1:-}" == bench ]]; then
    echo "== benchmarks"
    bin/dsv4-kv bench
fi
