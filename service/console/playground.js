// The panel Playground: the next tokens by both modes, after what was typed.

import { Failure, LOST, call, events as serverEvents } from "./api.js";
import { html, nothing } from "./vendor/lit-html.js";
import { SAMPLE, card, isEvents, state, update, writeAddress } from "./state.js";
import { Session, TOP_K } from "./session.js";
import { chooser, idOf, known } from "./events.js";
import { bound, count, ms, percent, points, small, token, windows } from "./words.js";
import { recipes } from "./recipes.js";

const MOST_GENERATED = 120;
const TEMPERATURE = 0.8;
const MARKED = 0.00005; // a difference of probabilities that is marked

const here = {
  session: null,
  tokens: [],
  both: null, // the answer of both modes
  step: null, // the latency of the last step
  problem: null,
  busy: false,
  again: false,
  retry: null,
  generating: null, // the AbortController of a generation
  lost: null, // the answers before and after the state was lost
  asked: "", // the continuations to compare, one in each line
  compared: null, // the continuations and the server's results for them, most probable first
  left: [], // the sessions that were forked: the session, and its text and events
  leaves: false, // whether Tab leaves the text, after Escape
  scrolled: false, // whether the end of the first text was shown
  clicked: false, // whether the text was clicked into
};
let reload = () => {};

// Says what to do if the server no longer knows the model.
export function onUnknown(action) {
  reload = action;
}

export function leavePage() {
  here.session?.remove();
  forget();
}

// Deletes the sessions that were forked.
function forget() {
  for (const one of here.left.splice(0)) one.session.remove();
}

// ---------------------------------------------------------------- following the text

export async function refresh() {
  clearTimeout(here.retry);
  if (here.busy) {
    here.again = true;
    return;
  }
  here.busy = true;
  do {
    here.again = false;
    await attempt(async () => {
      try {
        await follow();
      } catch (error) {
        here.both = null; // the last answer was for another text
        throw error;
      }
    });
  } while (here.again);
  here.busy = false;
  update();
}

// Runs an action of the panel alone, and shows why it failed.
async function attempt(action) {
  try {
    await action();
    here.problem = null;
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    here.problem = error.code === LOST ? "The server does not answer. Your text stays here." : error.message;
    if (error.code === "unknown_model") setTimeout(reload, 1000);
    if (error.status === 429 || error.code === LOST) {
      clearTimeout(here.retry);
      here.retry = setTimeout(refresh, 1000 * (error.document.retry_after_s ?? 1));
    }
  }
  update();
}

async function follow() {
  const model = card();
  if (!model) {
    here.both = null;
    if (state.models && state.model) throw new Failure(`The server has no model ${state.model}. Choose another one above.`);
    return;
  }
  if (here.session?.model !== model.id) {
    here.session?.remove();
    forget();
    here.session = new Session(model.id);
    here.session.onLost = () => update();
    here.lost = here.compared = null;
  }
  const { tokens, most } = await tokenise(model);
  here.tokens = tokens;
  if (!tokens.length) {
    here.both = null;
    return;
  }
  if (tokens.length > most) {
    here.both = null;
    throw new Failure(
      `The text has ${count(tokens.length)} tokens, and the server accepts ${count(most)}. Shorten it; nothing is lost.`,
    );
  }
  const stepped = await here.session.follow(tokens);
  if (stepped) here.step = stepped.latency;
  here.both = await predict();
}

async function tokenise(model) {
  if (isEvents()) return { tokens: await Promise.all(state.events.map(idOf)), most: Infinity };
  if (!state.text) return { tokens: [], most: Infinity };
  const found = await call("tokenize", { body: { model: model.id, prompt: state.text } });
  return { tokens: found.tokens, most: found.max_model_len };
}

const predict = () =>
  call("v1/predict", {
    body: { session: here.session.id, mode: "both", window: state.k, top_k: TOP_K, prove: true },
  });

export function typed(text) {
  state.text = text;
  here.lost = here.compared = null;
  here.generating?.abort();
  writeAddress();
  update();
  refresh();
}

function changeEvents(names) {
  state.events = names;
  here.lost = here.compared = null;
  here.generating?.abort();
  writeAddress();
  update();
  refresh();
}

export function moveWindow(k) {
  state.k = k;
  writeAddress();
  update();
  refresh();
}

function take(prediction) {
  if (prediction.bytes) return;
  if (isEvents()) {
    known(prediction.token, prediction.token_id);
    changeEvents([...state.events, prediction.token]);
  } else {
    typed(state.text + prediction.token);
    toTheEnd();
  }
}

function toTheEnd() {
  const area = document.querySelector("#text");
  if (!area) return;
  area.value = state.text;
  area.scrollTop = area.scrollHeight;
}

export function drawn() {
  const area = document.querySelector("#text");
  if (!area || here.scrolled) return;
  here.scrolled = true;
  area.scrollTop = area.scrollHeight;
}

// ---------------------------------------------------------------- generating

async function generate() {
  const stop = new AbortController();
  here.generating = stop;
  update();
  await attempt(async () => {
    const body = {
      model: state.model, tokens: here.tokens, max_tokens: MOST_GENERATED, temperature: TEMPERATURE, stream: true,
    };
    try {
      for await (const [name, data] of serverEvents("v1/generate", body, stop.signal)) {
        if (stop.signal.aborted) break;
        if (name === "error") throw new Failure(data.detail);
        if (name === "token" && data.token_id === card()?.vocabulary.eos_id && isEvents()) continue; // the session's end
        if (name === "token" && isEvents()) {
          known(data.token, data.token_id);
          state.events = [...state.events, data.token];
        } else if (name === "token") {
          state.text += data.text;
          toTheEnd();
        }
        if (name === "token") refresh();
        update();
      }
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    }
  });
  if (here.generating === stop) here.generating = null;
  here.lost = null;
  writeAddress();
  update();
  if (!here.problem) refresh();
}

export const stop = () => here.generating?.abort();

// ---------------------------------------------------------------- losing the state

async function loseState() {
  if (here.busy) return;
  here.busy = true;
  update();
  await attempt(async () => {
    await here.session.open();
    const before = await predict();
    await here.session.create(here.tokens, state.k);
    const after = await predict();
    here.lost = { before, after, kept: Math.min(state.k, here.tokens.length), of: here.tokens.length };
    here.both = after;
  });
  here.busy = false;
  if (here.again) refresh();
  update();
}

// ---------------------------------------------------------------- what if

// Runs an action on the session while nothing follows the text.
async function alone(action) {
  if (here.busy) return;
  here.busy = true;
  update();
  await attempt(action);
  here.busy = false;
  update();
}

// The text of a continuation: a space parts it from a word before it.
const spaced = (line) => (/\S$/.test(state.text) && /^\w/.test(line) ? ` ${line}` : line);

function compare() {
  const lines = here.asked.split("\n").filter((line) => line.trim());
  return alone(async () => {
    const given = lines.map((line) => (isEvents() ? { events: [line.trim()] } : spaced(line)));
    const body = { continuations: given, top_k: 1 };
    const { results } = await call(`v1/sessions/${here.session.id}/continuations`, { body });
    const sum = (one) => one.logprobs.reduce((total, value) => total + value, 0);
    here.compared = results.map((one, at) => ({ line: lines[at], sum: sum(one), ...one })).sort((a, b) => b.sum - a.sum);
  });
}

// Forks the session, and goes on in the fork with a continuation. The forked session is kept.
async function forkWith({ line }) {
  const before = { text: state.text, events: state.events };
  await alone(async () => {
    const fork = await here.session.fork();
    here.session.close();
    here.left.push({ session: here.session, ...before });
    here.session = fork;
    fork.onLost = () => update();
  });
  if (here.problem) return;
  if (isEvents()) changeEvents([...before.events, line.trim()]);
  else typed(before.text + spaced(line));
}

// Goes back to the session that was forked last, and deletes the fork.
function goBack() {
  if (here.busy) return;
  const { session, text, events } = here.left.pop();
  here.session.remove();
  here.session = session;
  if (isEvents()) changeEvents(events);
  else replaceBy(text);
}

// ---------------------------------------------------------------- keys

function keys(event) {
  if (event.key === "Escape") {
    if (here.generating) stop();
    else here.leaves = true;
    update();
  } else if (event.key === "Tab" && !event.shiftKey && !here.leaves && !event.ctrlKey && !event.altKey) {
    const first = here.both?.modes.recurrent.predictions.find((one) => !one.bytes);
    if (!first || here.busy) {
      event.preventDefault();
      return;
    }
    event.preventDefault();
    take(first);
  } else if (event.key !== "Tab" && event.key !== "Shift") {
    here.leaves = false;
  }
}

// The first click into the sample text is to continue it, wherever it hits.
function clicked({ target }) {
  if (!here.clicked && state.text === SAMPLE) target.setSelectionRange(SAMPLE.length, SAMPLE.length);
  here.clicked = true;
}

function replaceBy(text) {
  typed(text);
  document.getElementById("text").focus();
}

// ---------------------------------------------------------------- the view

const units = () => (isEvents() ? "events" : "tokens");

export function view() {
  const model = card();
  return html`
    <section class="intro">
      <h1>Playground</h1>
      <p>
        A recurrent model can answer in two ways. <b class="in-recurrent">Recurrent</b> has read every token and keeps a
        state on the server. <b class="in-window">Window</b> reads only the last k tokens and keeps nothing. Wane measures
        how far the two answers are apart, and proves how far they can be.
      </p>
    </section>
    <div class="split">
      <section class="card input" aria-label="Input">
        ${isEvents() ? eventInput() : textInput()} ${model ? actions(model) : nothing}
      </section>
      <section class="card output" aria-label="Next ${units()}" aria-busy=${here.busy}>
        ${columns()}
      </section>
    </div>
    ${here.lost ? recovery(here.lost) : nothing} ${model && here.both ? whatIf() : nothing} ${model ? recipes(here.tokens) : nothing}
  `;
}

const textInput = () => html`
  <div class="head">
    <label for="text">Your text</label>
    <span class="muted">${here.tokens.length ? `${count(here.tokens.length)} tokens` : ""}</span>
  </div>
  <textarea
    id="text"
    spellcheck="false"
    rows="10"
    aria-describedby="text-help text-problem"
    .value=${state.text}
    @input=${(event) => typed(event.target.value)}
    @keydown=${keys}
    @click=${clicked}
    @blur=${() => (here.leaves = false)}
  ></textarea>
  ${problem()}
  <p class="muted" id="text-help">
    <kbd>Tab</kbd> takes the first token, <kbd>Esc</kbd> then <kbd>Tab</kbd> leaves the text.
    ${state.text === SAMPLE ? nothing : html`<button class="link" @click=${() => replaceBy(SAMPLE)}>Use the sample text</button>`}
    ${state.text ? html`<button class="link" @click=${() => replaceBy("")}>Clear</button>` : nothing}
  </p>
`;

const eventInput = () => html`
  <div class="head">
    <b id="events-label">The session’s events</b>
    <span class="muted">${state.events.length ? `${count(state.events.length)} ${state.events.length === 1 ? "event" : "events"}` : ""}</span>
  </div>
  <ol class="chips" aria-labelledby="events-label">
    ${state.events.map(
      (name, index) => html`<li class="chip">
        <span>${name}</span>
        <button
          aria-label="Remove ${name}"
          @click=${() => changeEvents(state.events.filter((_, place) => place !== index))}
        >×</button>
      </li>`,
    )}
  </ol>
  ${chooser((name) => changeEvents([...state.events, name]), stop)} ${problem()}
`;

const problem = () => html`
  <div id="text-problem" role="status">
    ${here.problem ? html`<p class="problem">${here.problem}</p>` : nothing}
  </div>
`;

function actions(model) {
  const choices = windows(model.max_window);
  const place = Math.max(0, choices.findIndex((k) => k >= state.k));
  const empty = !here.tokens.length;
  return html`
    <div class="field">
      <div class="head">
        <label for="k">Window: the last <b class="in-window">${count(state.k)}</b> ${units()}</label>
        <span class="muted">k, 1 to ${count(model.max_window)}</span>
      </div>
      <input
        id="k"
        type="range"
        min="0"
        max=${choices.length - 1}
        step="1"
        .value=${String(place)}
        aria-valuetext="${state.k} ${units()}"
        @input=${(event) => moveWindow(choices[event.target.value])}
      />
    </div>
    <div class="buttons">
      ${here.generating
        ? html`<button class="primary" id="stop" @click=${stop}>Stop <kbd>Esc</kbd></button>`
        : html`<button class="primary" id="generate" ?disabled=${empty} @click=${generate}
            title="Draws up to ${MOST_GENERATED} tokens at temperature ${TEMPERATURE}">Generate</button>`}
      <button id="lose" ?disabled=${empty || here.busy || here.generating} @click=${loseState}
        title="Deletes the session, and creates it again from its last ${state.k} tokens">Lose the state</button>
    </div>
  `;
}

function columns() {
  if (!here.both) {
    if (here.problem) return html`<p class="empty">No prediction: see the message beside the input.</p>`;
    if (!state.models || here.busy) return html`<p class="empty">Loading …</p>`;
    return html`<p class="empty">
      ${isEvents() ? "There are no events yet. Add one, and the most probable next events appear here." : "The text is empty. Type, and the most probable next tokens appear here."}
    </p>`;
  }
  const { agreement, modes } = here.both;
  const { recurrent, window } = modes;
  const most = Math.max(...[...recurrent.predictions, ...window.predictions].map((one) => one.probability), 0.01);
  return html`
    <div class="pair">
      ${column("recurrent", "Recurrent", `all ${count(here.both.position)}`, recurrent.predictions, window.predictions, most)}
      ${column("window", "Window", `last ${count(Math.min(here.both.window, here.both.position))}`, window.predictions, recurrent.predictions, most)}
    </div>
    <div class="verdict ${agreement.top1_proved ? "is-proved" : ""}">
      <span class="badge" id="proved">${agreement.top1_proved ? "proved" : "not proved"}</span>
      <p>${verdict(agreement)}</p>
    </div>
    <dl class="facts">
      ${fact("position", "Position", count(here.both.position), `${units()} in the session`)}
      ${fact("latency-recurrent", "Recurrent", ms(here.step?.total_ms), "latency of the last step", "in-recurrent")}
      ${fact("latency-window", "Window", ms(window.latency.total_ms), "latency of its run", "in-window")}
      ${fact("distance", "Measured", small(agreement.total_variation), "total variation, this text")}
      ${fact("bound", "Error bound", bound(agreement.error_bound), "of the window, proved")}
      ${fact("state", "State", here.both.state, `its own bound: ${bound(here.both.error_bound)}`)}
    </dl>
  `;
}

function verdict(agreement) {
  const model = card();
  const same = agreement.top1_match;
  if (agreement.top1_proved)
    return `From the last ${state.k} ${units()} alone it is proved that the full model has the same first ${isEvents() ? "event" : "token"}, whatever came before.`;
  const seen = same ? "Both modes have the same first token here, but that was seen, not proved." : "The two modes have different first tokens here.";
  if (agreement.error_bound == null) return `${seen} This model has no bound${model?.certificate.reason ? ": it is not proved to forget" : ""}.`;
  return `${seen} ${agreement.error_bound >= 1 ? "A bound of 1 promises nothing: use a longer window." : ""}`;
}

const fact = (id, name, value, about, tone = "") => html`
  <div>
    <dt class=${tone}>${name}</dt>
    <dd id="fact-${id}">${value}</dd>
    <dd class="muted">${about}</dd>
  </div>
`;

function column(mode, title, reach, predictions, others, most) {
  const other = new Map(others.map((one) => [one.token_id, one.probability]));
  return html`
    <div class="column ${mode}">
      <h2 class="in-${mode}">${title} <small>${reach} ${units()}</small></h2>
      <ol>
        ${predictions.map((one) => {
          const there = other.get(one.token_id);
          const difference = there === undefined ? null : one.probability - there;
          const marked = difference === null || Math.abs(difference) >= MARKED;
          return html`<li>
            <button
              class="prediction ${marked ? "differs" : ""}"
              .style="--share: ${(one.probability / most).toFixed(4)}; --other: ${((there ?? 0) / most).toFixed(4)}"
              data-token-id=${one.token_id}
              data-probability=${one.probability}
              ?disabled=${Boolean(one.bytes)}
              @click=${() => take(one)}
            >
              ${token(one)}
              <span class="difference">${difference === null ? "only here" : marked ? points(difference) : ""}</span>
              <span class="share">${percent(one.probability)}</span>
              <span class="bar" aria-hidden="true"></span>
            </button>
          </li>`;
        })}
      </ol>
    </div>
  `;
}

function recovery({ before, after, kept, of }) {
  const old = new Map(before.modes.recurrent.predictions.map((one) => [one.token_id, one.probability]));
  const rows = after.modes.recurrent.predictions;
  const largest = Math.max(...rows.filter((one) => old.has(one.token_id)).map((one) => Math.abs(one.probability - old.get(one.token_id))));
  return html`
    <section class="card recovery" id="recovery" aria-label="After the loss of the state">
      <h2>The state was lost, and came back</h2>
      <p>
        The session and its state were deleted. It was created again from its last ${count(kept)} of ${count(of)} ${units()}.
        The answer moved by at most <b>${small(largest)}</b> among the listed ${units()}; the server had promised
        <b id="recovered-bound">${bound(after.error_bound)}</b> for the whole distribution.
      </p>
      <div class="scroll" tabindex="0" role="region" aria-label="Answers before and after">
        <table>
          <thead><tr><th>Next</th><th class="number">Before</th><th class="number">After</th></tr></thead>
          <tbody>
            ${rows.map((one) => html`<tr>
              <td>${token(one)}</td>
              <td class="number">${old.has(one.token_id) ? percent(old.get(one.token_id)) : "not listed"}</td>
              <td class="number">${percent(one.probability)}</td>
            </tr>`)}
          </tbody>
        </table>
      </div>
    </section>
  `;
}

function whatIf() {
  const one = isEvents() ? "event" : "continuation";
  return html`
    <section class="card what-if" id="what-if" aria-label="What if">
      <div class="head">
        <label for="continuations">What if: one ${one} in each line</label>
        ${here.left.length
          ? html`<button id="back" ?disabled=${here.busy} @click=${goBack}>Back to the session before the fork (${count(here.left.length)})</button>`
          : nothing}
      </div>
      <textarea id="continuations" rows="3" spellcheck="false" .value=${here.asked}
        @input=${(event) => { here.asked = event.target.value; update(); }}></textarea>
      <div class="buttons">
        <button id="compare" ?disabled=${here.busy || !here.asked.trim()} @click=${compare}
          title="Scores all of them from the session's state in one batch; the session does not change">Compare</button>
      </div>
      ${here.compared
        ? html`<div class="scroll" tabindex="0" role="region" aria-label="Continuations">
            <table>
              <thead><tr><th>Continuation</th><td></td><th class="number">Probability</th><th class="number">Error bound</th><th>Next</th></tr></thead>
              <tbody>
                ${here.compared.map((found) => html`<tr data-sum=${found.sum}>
                  <td>${found.line}</td>
                  <td><button class="fork" ?disabled=${here.busy} @click=${() => forkWith(found)}
                    title="Copies the session and its state on the server, and goes on in the copy">Fork</button></td>
                  <td class="number">${small(Math.exp(found.sum))}</td>
                  <td class="number">${bound(found.error_bound)}</td>
                  <td>${found.predictions.length ? token(found.predictions[0]) : nothing}</td>
                </tr>`)}
              </tbody>
            </table>
          </div>`
        : nothing}
    </section>
  `;
}
