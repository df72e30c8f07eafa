// The panel Forgetting: how far a window of k tokens is from the whole text, measured, proved and certified.

import { Failure, call } from "./api.js";
import { html, nothing } from "./vendor/lit-html.js";
import { SAMPLE, card, isEvents, state, update } from "./state.js";
import { bound, count, ms, small, windows } from "./words.js";
import { draw } from "./chart.js";
import { idOf } from "./events.js";
import { typed } from "./playground.js";

const FLOOR = 1e-8; // where a logarithmic axis shows 0
const REPEAT = 10;
const PLACES = 12; // the number of beginnings of the text at which the first tokens are compared

const here = { of: null, rows: null, step: null, tokens: 0, done: 0, total: 0, problem: null, stop: null };

const input = () => JSON.stringify([state.model, isEvents() ? state.events : state.text]);

export function enter() {
  if (here.of !== input()) measure();
}

export function leave() {
  here.stop?.abort();
}

async function measure() {
  const model = card();
  if (!model) return;
  here.stop?.abort();
  const { signal } = (here.stop = new AbortController());
  Object.assign(here, { of: input(), rows: null, problem: null, done: 0, total: 0 });
  update();
  try {
    await run(model, signal);
  } catch (error) {
    if (error.name === "AbortError") {
      if (here.stop.signal === signal) here.of = null;
      return;
    }
    if (!(error instanceof Failure)) throw error;
    Object.assign(here, { problem: error.message, of: null });
  }
  if (here.stop.signal === signal) here.stop = null;
  update();
}

async function run(model, signal) {
  const given = isEvents()
    ? await Promise.all(state.events.map(idOf))
    : state.text ? (await call("tokenize", { body: { model: model.id, prompt: state.text }, signal })).tokens : [];
  here.tokens = given.length;
  if (!given.length) return;
  const ks = windows(model.max_window, false);
  const ends = places(given.length);
  here.total = 2 + ks.length + ends.length;
  const done = () => ((here.done += 1), update());

  const certified = (await call(`v1/models/${encodeURIComponent(model.id)}`, { signal })).certificate.error_bound;
  done();
  const compare = async (tokens, repeat) =>
    (await call("v1/compare", { body: { model: model.id, tokens, windows: ks, repeat }, signal })).models[0];
  const whole = await compare(given, REPEAT);
  done();
  here.step = whole.recurrent.latency.total;
  const rows = whole.windows.map((one) => ({
    k: one.window,
    measured: one.agreement.total_variation,
    proved: null,
    certified: certified[one.window - 1] ?? null,
    latency: one.latency.total,
    same: 0,
    places: 0,
  }));
  here.rows = rows;
  update();
  for (const row of rows) {
    const body = { model: model.id, tokens: given, mode: "window", window: row.k, top_k: 1, prove: true };
    row.proved = (await call("v1/predict", { body, signal })).error_bound;
    done();
  }
  for (const end of ends) {
    const { windows: found } = await compare(given.slice(0, end), 1);
    found.forEach((one, index) => {
      rows[index].places += 1;
      rows[index].same += one.agreement.top1_match;
    });
    done();
  }
}

// Evenly spaced beginnings of a text, the last of which is the whole text.
function places(length) {
  const number = Math.min(PLACES, length);
  return [...new Set(Array.from({ length: number }, (_, index) => Math.round(((index + 1) * length) / number)))];
}

// ---------------------------------------------------------------- the view

const CURVES = [
  { name: "measured", label: "Measured, this text", color: "--window", points: true },
  { name: "proved", label: "Proved, this text", color: "--proved", dash: [7, 4], points: true },
  { name: "certified", label: "Certified, every text", color: "--muted", dash: [2, 3] },
];

export function view() {
  const model = card();
  return html`
    <section class="intro">
      <h1>Forgetting</h1>
      <p>
        How much does a model lose if it reads only the last k tokens of the text? The distance is the total variation
        between the two answers: 0 means the same answer, 1 means nothing in common.
      </p>
    </section>
    ${progress()}
    ${here.problem ? html`<p class="problem" role="status">${here.problem} <button class="link" @click=${measure}>Measure again</button></p>` : nothing}
    ${model && here.of !== null && !here.tokens && !here.stop
      ? html`<p class="problem" role="status">
          There is nothing to measure: the input is empty. <a href="#playground">Write something</a>
          ${isEvents() ? nothing : html`or <button class="link" @click=${() => (typed(SAMPLE), measure())}>use the sample text</button>`}.
        </p>`
      : nothing}
    ${here.rows ? results(here.rows) : nothing}
  `;
}

const progress = () =>
  here.stop
    ? html`<div class="progress" role="status">
        <label for="measuring">Measuring ${state.model} …</label>
        <progress id="measuring" max=${here.total || 1} value=${here.done}></progress>
      </div>`
    : nothing;

const results = (rows) => html`
  <section class="card" aria-labelledby="curves">
    <div class="head">
      <h2 id="curves">Distance by window</h2>
      <span class="muted">${state.model}, ${count(here.tokens)} tokens</span>
    </div>
    <div class="beside">
      <figure>
        <div class="chart" id="chart-forgetting" role="img" aria-label="Total variation by window; the table has the numbers"></div>
        <figcaption class="muted">Total variation; both axes are logarithmic, and the lowest line is 0. A window that holds the whole text is exact.</figcaption>
        <ul class="legend">
          <li><i class="line measured"></i><span><b>Measured</b> by this server for this text. It promises nothing about other texts.</span></li>
          <li><i class="line proved"></i><span><b>Proved</b> for these last k tokens: whatever came before them, the distance cannot be larger.</span></li>
          <li><i class="line certified"></i><span><b>Certified</b> for every text, from the weights alone.
            ${rows.every((row) => row.certified === null) ? "This model has no certificate: nothing bounds how long it remembers." : ""}</span></li>
        </ul>
      </figure>
      <div class="scroll" tabindex="0" role="region" aria-label="Distance by window, as a table">
        <table>
          <thead><tr><th class="number">k</th><th class="number">Measured</th><th class="number">Proved</th><th class="number">Certified</th></tr></thead>
          <tbody>
            ${rows.map((row) => html`<tr>
              <td class="number">${count(row.k)}</td>
              <td class="number">${small(row.measured)}</td>
              <td class="number">${row.proved === null && here.stop ? "…" : bound(row.proved)}</td>
              <td class="number">${bound(row.certified)}</td>
            </tr>`)}
          </tbody>
        </table>
      </div>
    </div>
  </section>
  <section class="card" aria-labelledby="agreement">
    <h2 id="agreement">Agreement and latency</h2>
    <div class="beside">
      <div>
        <figure>
          <div class="chart" id="chart-agreement" role="img" aria-label="Share of places with the same first token, by window; the table has the numbers"></div>
          <figcaption class="muted">Share of ${count(rows[0].places)} places in this text where the window has the same first token.</figcaption>
        </figure>
        <figure>
          <div class="chart" id="chart-latency" role="img" aria-label="Latency by window; the table has the numbers"></div>
          <figcaption class="muted">
            Latency, p50 of ${REPEAT} runs. Dashed: one step from a resident state, ${ms(here.step?.p50_ms)}.
          </figcaption>
        </figure>
      </div>
      <div class="scroll" tabindex="0" role="region" aria-label="Agreement and latency by window, as a table">
        <table>
          <thead><tr><th class="number">k</th><th class="number">Same first token</th><th class="number">p50</th><th class="number">p99</th></tr></thead>
          <tbody>
            ${rows.map((row) => html`<tr>
              <td class="number">${count(row.k)}</td>
              <td class="number">${row.places ? `${row.same} of ${row.places}` : "…"}</td>
              <td class="number">${ms(row.latency.p50_ms)}</td>
              <td class="number">${ms(row.latency.p99_ms)}</td>
            </tr>`)}
            <tr><td class="number">step</td><td class="number">–</td><td class="number">${ms(here.step.p50_ms)}</td><td class="number">${ms(here.step.p99_ms)}</td></tr>
          </tbody>
        </table>
      </div>
    </div>
  </section>
  <p>${here.stop ? nothing : html`<button id="measure" @click=${measure}>Measure again</button>`}</p>
`;

export function drawn() {
  if (!here.rows) return;
  const ks = here.rows.map((row) => row.k);
  const shownKs = innerWidth < 500 ? ks.filter((_, index) => index % 2 === 0) : ks;
  const x = {
    scale: { distr: 3, log: 2, range: [ks[0], ks.at(-1)] },
    axis: { splits: () => shownKs, values: (_, found) => found.map(String), filter: (_, found) => found },
  };
  draw("chart-forgetting", {
    data: [ks, ...CURVES.map(({ name }) => here.rows.map((row) => (row[name] === null ? null : Math.max(row[name], FLOOR))))],
    lines: CURVES,
    x,
    y: {
      scale: { distr: 3, log: 10, range: [FLOOR, 1] },
      axis: {
        splits: () => [1e-8, 1e-6, 1e-4, 1e-2, 1],
        values: (_, found) => found.map((one) => (one <= FLOOR ? "0" : one < 0.01 ? one.toExponential(0) : String(one))),
        filter: (_, found) => found,
      },
    },
  });
  draw("chart-agreement", {
    data: [ks, here.rows.map((row) => (row.places ? row.same / row.places : null))],
    lines: [{ label: "same first token", color: "--window", points: true }],
    x,
    y: { scale: { range: [0, 1.02] }, axis: { splits: () => [0, 0.25, 0.5, 0.75, 1], values: (_, found) => found.map((one) => `${100 * one}%`) } },
  });
  draw("chart-latency", {
    data: [ks, here.rows.map((row) => row.latency.p50_ms), ks.map(() => here.step.p50_ms)],
    lines: [
      { label: "window", color: "--window", points: true },
      { label: "one step", color: "--recurrent", dash: [7, 4] },
    ],
    x,
    y: { scale: { range: (_, least, most) => [0, 1.1 * most] }, axis: { values: (_, found) => found.map((one) => `${one} ms`) } },
  });
}
