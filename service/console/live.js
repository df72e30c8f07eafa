// The panel Live: what the server does now, from /v1/report every 2 seconds while the page is visible.

import { Failure, LOST, answer, call } from "./api.js";
import { html, nothing } from "./vendor/lit-html.js";
import { state, update } from "./state.js";
import { count, ms, percent, small } from "./words.js";
import { draw } from "./chart.js";

const EVERY_MS = 2000;
const KEPT = 150; // samples: 5 minutes
const MODES = ["recurrent", "window"];
const FORBIDDEN = 403;

const here = { samples: [], last: null, batches: null, mayReadMetrics: true, problem: null, timer: null, of: null };

export function enter() {
  poll();
}

export function leave() {
  clearTimeout(here.timer);
  here.timer = null;
}

export function visible(isVisible) {
  if (isVisible && here.timer === null) poll();
  else if (!isVisible) leave();
}

async function poll() {
  clearTimeout(here.timer);
  const turn = (here.timer = setTimeout(poll, EVERY_MS));
  try {
    const report = await call("v1/report");
    if (here.mayReadMetrics) await readBatches();
    take(report);
    here.problem = null;
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    here.problem = error.code === LOST ? null : error.message;
    if (error.status === 401 && here.timer === turn) leave();
  }
  update();
}

async function readBatches() {
  try {
    const response = await answer("metrics", { quiet: true });
    here.batches = batches(await response.text());
  } catch (error) {
    if (error.status !== FORBIDDEN) throw error;
    here.mayReadMetrics = false;
  }
}

// Reads the number of batches and their items by model and role from Prometheus's text format.
function batches(text) {
  const found = [];
  for (const [, what, labels, value] of text.matchAll(/^wane_batch_items_(sum|count)\{(.*)\} (\S+)$/gm)) {
    const { model, role } = Object.fromEntries([...labels.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, name, one]) => [name, one]));
    let row = found.find((one) => one.model === model && one.role === role);
    if (!row) found.push((row = { model, role }));
    row[what] = Number(value);
  }
  return found;
}

function take(report) {
  const now = performance.now() / 1000;
  if (here.of !== state.model) Object.assign(here, { samples: [], last: null, of: state.model });
  const model = report.models.find((one) => one.model === state.model);
  if (!model) {
    here.last = null;
    return;
  }
  const before = here.last;
  here.last = { now, report, model };
  if (!before || now - before.now < 0.5) return;
  const requests = (from) => Object.values(from.modes).reduce((sum, mode) => sum + mode.requests, 0);
  const sample = { at: now, requests: Math.max(0, requests(model) - requests(before.model)) / (now - before.now) };
  for (const mode of MODES) {
    const [new_, old] = [model, before.model].map((one) => one.modes[mode]?.latency.total);
    const buckets = new_?.buckets.map((one, index) => ({ le: one.le_ms, count: one.count - (old?.buckets[index].count ?? 0) })) ?? [];
    const answers = Math.max(0, (new_?.count ?? 0) - (old?.count ?? 0));
    sample[mode] = {
      rate: answers / (now - before.now),
      p50: answers ? quantile(buckets, 0.5) : null,
      p90: answers ? quantile(buckets, 0.9) : null,
      p99: answers ? quantile(buckets, 0.99) : null,
    };
  }
  here.samples = [...here.samples, sample].slice(-KEPT);
}

// Interpolates a quantile within its bucket. The buckets are cumulative.
function quantile(buckets, share) {
  const wanted = share * buckets.at(-1).count;
  let [below, lower] = [0, 0];
  for (const { le, count: sum } of buckets) {
    if (sum >= wanted) return le === null ? lower : lower + ((le - lower) * (wanted - below)) / Math.max(1, sum - below);
    [below, lower] = [sum, le];
  }
  return lower;
}

// ---------------------------------------------------------------- the view

export function view() {
  return html`
    <section class="intro">
      <h1>Live</h1>
      <p>What this server does for <b>${state.model}</b>, every 2 seconds. Requests of other clients count, too.</p>
    </section>
    ${here.problem ? html`<p class="problem" role="status">${here.problem}</p>` : nothing}
    ${here.last ? numbers(here.last.model) : html`<p class="empty">Loading …</p>`}
  `;
}

// How often the next token of a session was among those that the answer before it listed.
function accuracy({ k, recent, since_start }) {
  const shown = recent.judged ? recent : since_start;
  const span = recent.judged ? "in the last 10 minutes" : "since the start";
  const about = `MRR ${shown.judged ? small(shown.mrr) : "–"}, ${count(shown.judged)} steps ${span}`;
  return tile(`Next token in the first ${k}`, shown.judged ? percent(shown.recall) : "–", about);
}

function numbers(model) {
  const last = here.samples.at(-1);
  const { agreement, sessions } = model;
  const rows = here.batches?.filter((one) => one.model === model.model && one.count) ?? [];
  return html`
    <dl class="tiles">
      ${tile("Requests a second", last ? small(last.requests) : "–", "of every mode")}
      ${tile("Same first token", agreement.compared ? percent(agreement.top1_match_rate) : "–", `of ${count(agreement.compared)} comparisons`)}
      ${tile("Largest distance", agreement.compared ? small(agreement.total_variation.max) : "–", `${count(agreement.bound_violations)} over their bound`)}
      ${tile("Sessions", count(sessions.resident + sessions.parked), `${count(sessions.resident)} resident, ${count(sessions.parked)} parked`)}
      ${model.live_accuracy ? accuracy(model.live_accuracy) : nothing}
      ${tile("States rebuilt", count(sessions.rebuilt), "from a session’s last tokens")}
    </dl>
    <div class="two">
      <section class="card" aria-labelledby="rates">
        <h2 id="rates">Answers a second</h2>
        <figure>
          <div class="chart" id="chart-rates" role="img" aria-label="Answers a second by mode; the table below has the latest numbers"></div>
          ${legend}
        </figure>
      </section>
      <section class="card" aria-labelledby="latencies">
        <h2 id="latencies">Latency</h2>
        <figure>
          <div class="chart" id="chart-latencies" role="img" aria-label="Latency by mode; the table below has the latest numbers"></div>
          <p class="muted">Full lines: p50; dashed: p99. In milliseconds, of the answers between two measurements.</p>
        </figure>
      </section>
    </div>
    <section class="card" aria-labelledby="modes">
      <h2 id="modes">By mode</h2>
      <div class="scroll" tabindex="0" role="region" aria-label="Numbers by mode">
        <table>
          <thead>
            <tr><th>Mode</th><th class="number">A second</th><th class="number">p50</th><th class="number">p90</th><th class="number">p99</th><th class="number">Answers</th><th class="number">p50 since start</th><th class="number">p99 since start</th></tr>
          </thead>
          <tbody>
            ${MODES.map((mode) => {
              const total = model.modes[mode]?.latency.total;
              const now = last?.[mode];
              return html`<tr>
                <th scope="row" class="in-${mode}">${mode}</th>
                <td class="number">${now ? small(now.rate) : "–"}</td>
                <td class="number">${ms(now?.p50)}</td><td class="number">${ms(now?.p90)}</td><td class="number">${ms(now?.p99)}</td>
                <td class="number">${count(total?.count ?? 0)}</td>
                <td class="number">${ms(total?.p50_ms)}</td><td class="number">${ms(total?.p99_ms)}</td>
              </tr>`;
            })}
          </tbody>
        </table>
      </div>
    </section>
    <section class="card" aria-labelledby="batches">
      <h2 id="batches">Batch sizes</h2>
      ${here.mayReadMetrics
        ? rows.length
          ? html`<div class="scroll" tabindex="0" role="region" aria-label="Batch sizes by graph"><table>
              <thead><tr><th>Graph</th><th class="number">Batches</th><th class="number">Requests in a batch, on average</th></tr></thead>
              <tbody>
                ${rows.map((row) => html`<tr><th scope="row">${row.role}</th><td class="number">${count(row.count)}</td><td class="number">${small(row.sum / row.count)}</td></tr>`)}
              </tbody>
            </table></div>`
          : html`<p class="muted">No batch has run yet.</p>`
        : html`<p class="muted">This key may not read /metrics, which has the batch sizes. It needs the scope metrics.</p>`}
    </section>
  `;
}

const legend = html`<ul class="legend">
  <li><i class="line recurrent"></i><span>Recurrent</span></li>
  <li><i class="line measured"></i><span>Window</span></li>
</ul>`;

const tile = (name, value, about) => html`<div class="tile"><dt>${name}</dt><dd>${value}</dd><dd class="muted">${about}</dd></div>`;

export function drawn() {
  if (!here.last) return;
  const end = here.samples.at(-1)?.at ?? 0;
  const ages = here.samples.map((one) => one.at - end);
  const x = {
    scale: { range: [Math.min(-60, ages[0] ?? 0), 0] },
    axis: { values: (_, found) => found.map((one) => `${one} s`) },
  };
  const line = (mode, what) => here.samples.map((one) => one[mode][what]);
  const y = { scale: { range: (_, least, most) => [0, Math.max(1, 1.1 * (most ?? 0))] } };
  draw("chart-rates", {
    data: [ages, line("recurrent", "rate"), line("window", "rate")],
    lines: [{ label: "recurrent", color: "--recurrent" }, { label: "window", color: "--window" }],
    x, y,
  });
  draw("chart-latencies", {
    data: [ages, line("recurrent", "p50"), line("recurrent", "p99"), line("window", "p50"), line("window", "p99")],
    lines: [
      { label: "recurrent p50", color: "--recurrent", points: true }, { label: "recurrent p99", color: "--recurrent", dash: [6, 4] },
      { label: "window p50", color: "--window", points: true }, { label: "window p99", color: "--window", dash: [6, 4] },
    ],
    x, y,
  });
}
