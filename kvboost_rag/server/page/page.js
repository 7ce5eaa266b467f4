// The operator's page: figures every few seconds, and a prompt answered by reuse beside full prefill.
const $ = (id) => document.getElementById(id);
const LOOK_MS = 3000;
const history = [];

$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  refresh();
});

async function call(path, options = {}) {
  const headers = { ...(options.headers ?? {}) };
  if ($("key").value) headers.authorization = `Bearer ${$("key").value}`;
  if (options.body) headers["content-type"] = "application/json";
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) {
    const fault = await response.json().catch(() => ({}));
    throw new Error(fault.error?.message ?? `${response.status}`);
  }
  return response;
}

function number(value, digits = 0) {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
}

// Sums of one Prometheus family by the labels named.
function sums(text, family, label) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = line.match(/^(\w+)(?:\{(.*)\})? (\S+)$/);
    if (match?.[1] !== family) continue;
    const key = match[2]?.match(new RegExp(`${label}="([^"]*)"`))?.[1] ?? "";
    found[key] = (found[key] ?? 0) + Number(match[3]);
  }
  return found;
}

function show(stats, metrics) {
  const hits = Object.values(sums(metrics, "kvboost_cache_hits_total", "kind")).reduce((a, b) => a + b, 0);
  const misses = Object.values(sums(metrics, "kvboost_cache_misses_total", "model")).reduce((a, b) => a + b, 0);
  const total = sums(metrics, "kvboost_request_ttft_seconds_sum", "enabled");
  const count = sums(metrics, "kvboost_request_ttft_seconds_count", "enabled");
  const recomputed = Object.values(sums(metrics, "kvboost_recompute_tokens_total", "strategy")).reduce((a, b) => a + b, 0);
  const mean = (key) => (count[key] ? `${number((1000 * total[key]) / count[key])} ms` : "–");
  const bytes = Object.entries(stats.bytes_held).map(([tier, n]) => `${tier} ${number(n / 1e6, 1)} MB`);
  const rows = {
    Model: stats.model,
    "Chunks known": number(stats.num_chunks_known),
    "KV held": bytes.join(", ") || "–",
    "Documents from the store": hits + misses ? `${number((100 * hits) / (hits + misses), 1)} %` : "–",
    "Mean time to first token, reuse": mean("true"),
    "Mean time to first token, full prefill": mean("false"),
    "Rows recomputed": number(recomputed),
    "KL from full prefill (shadow)": number(stats.shadow.kl_mean, 4),
    Requests: number(stats.requests),
  };
  $("figures").replaceChildren(
    ...Object.entries(rows).flatMap(([name, value]) => {
      const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
      dt.textContent = name;
      dd.textContent = value;
      return [dt, dd];
    }),
  );
  if (stats.shadow.kl_mean !== null) history.push(stats.shadow.kl_mean);
  const top = Math.max(...history, 0.001);
  const points = history.slice(-100).map((kl, i, all) => `${(300 * i) / Math.max(1, all.length - 1)},${58 - (55 * kl) / top}`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.join(" "));
  $("kl").replaceChildren(line);
}

async function refresh() {
  try {
    const [stats, metrics, listing] = await Promise.all([
      call("/kvboost/stats").then((r) => r.json()),
      call("/metrics").then((r) => r.text()),
      call("/v1/documents").then((r) => r.json()),
    ]);
    show(stats, metrics);
    $("documents").replaceChildren(
      ...listing.data.slice(0, 500).map(({ id }) => {
        const item = document.createElement("li");
        item.textContent = id;
        return item;
      }),
    );
    $("status").textContent = "";
    return stats.model;
  } catch (fault) {
    $("status").textContent = fault.message;
    return null;
  }
}

async function ask(model, enabled) {
  const body = { model, messages: [{ role: "user", content: $("prompt").value }], max_tokens: 128 };
  const headers = { "x-kvboost-enabled": String(enabled), "x-kvboost-report": "text" };
  const response = await call("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers });
  return response.json();
}

function fill(name, answer) {
  $(name).textContent = answer.choices[0].message.content;
  const cached = answer.usage.prompt_tokens_details.cached_tokens;
  $(`${name}-time`).textContent = `${number(answer.kvboost.ttft_ms)} ms to the first token, ${cached} of ${answer.usage.prompt_tokens} tokens reused`;
}

$("ask").addEventListener("click", async () => {
  $("ask").disabled = true;
  try {
    const model = await refresh();
    const reuse = await ask(model, true);
    fill("reuse", reuse);
    $("segments").replaceChildren(
      ...reuse.kvboost.segments.map((segment) => {
        const mark = document.createElement("mark");
        mark.className = segment.hit;
        mark.textContent = segment.text;
        mark.title = `${segment.kind}, ${segment.num_tokens} tokens, ${segment.num_recomputed_tokens} recomputed`;
        return mark;
      }),
    );
    fill("full", await ask(model, false));
  } catch (fault) {
    $("status").textContent = fault.message;
  } finally {
    $("ask").disabled = false;
    refresh();
  }
});

refresh();
setInterval(refresh, LOOK_MS);
