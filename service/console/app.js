// The page: its header, the four panels, the key, and the connection to the server.

import { Failure, LOST, call, url } from "./api.js";
import { PANELS, card, onUpdate, readAddress, readPanel, state, update, writeAddress, writePanel } from "./state.js";
import { html, nothing, render } from "./vendor/lit-html.js";
import * as forgetting from "./forgetting.js";
import * as live from "./live.js";
import * as models from "./models.js";
import * as playground from "./playground.js";

const TITLES = { playground: "Playground", forgetting: "Forgetting", live: "Live", models: "Models" };
const VIEWS = { playground, forgetting, live, models };
const THEMES = ["auto", "light", "dark"];
const HEALTH_MS = 1000;

let theme = localStorage.getItem("wane-theme") ?? "auto";
let shown = null; // the panel that is open

// ---------------------------------------------------------------- the models

async function load() {
  const before = state.models;
  try {
    const { data } = await call("v1/models");
    state.models = data;
    state.problem = null;
    state.model ??= data[0]?.id ?? null;
    fitWindow();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    state.problem = error.code === LOST || error.status === 401 ? null : error.message;
    if (error.code !== LOST && error.status !== 401) setTimeout(load, 1000);
    update();
    return;
  }
  update();
  playground.refresh();
  if (state.panel !== "models" || !before) VIEWS[state.panel].enter?.();
}

function fitWindow() {
  const model = card();
  if (model) state.k = Math.min(state.k ?? model.k, model.max_window);
}

function choose(id) {
  if (!state.models?.some((one) => one.id === id)) return;
  state.model = id;
  state.k = null;
  fitWindow();
  writeAddress();
  update();
  playground.refresh();
  VIEWS[state.panel].enter?.();
}

// ---------------------------------------------------------------- the connection

async function isAlive() {
  try {
    const response = await fetch(url("healthz"), { cache: "no-store", signal: AbortSignal.timeout(HEALTH_MS) });
    await response.text();
    return response.ok;
  } catch {
    return false;
  }
}

async function watch() {
  clearTimeout(watch.timer);
  if (!document.hidden) {
    const alive = await isAlive();
    if (alive !== state.connected) {
      state.connected = alive;
      update();
      if (alive) load();
    }
  }
  watch.timer = setTimeout(watch, HEALTH_MS);
}

// ---------------------------------------------------------------- the key

function giveKey(event) {
  event.preventDefault();
  state.key = event.target.querySelector("input").value.trim();
  sessionStorage.setItem("wane-key", state.key);
  state.asksKey = false;
  update();
  load();
}

const keyDialog = () => html`
  <dialog id="key-dialog" aria-labelledby="key-title" @cancel=${(event) => event.preventDefault()}>
    <form @submit=${giveKey}>
      <h2 id="key-title">This server wants an API key</h2>
      <p>${state.keyRefused ? "The key was not accepted. It may be misspelt, revoked or expired." : "The page keeps the key until you close this tab, and sends it to this server only."}</p>
      <label for="key">API key</label>
      <input id="key" type="password" autocomplete="off" required spellcheck="false" />
      <button class="primary">Use this key</button>
    </form>
  </dialog>
`;

// ---------------------------------------------------------------- the page

const page = () => html`
  <a class="skip" href="#main" @click=${(event) => (event.preventDefault(), document.querySelector("#main").focus())}>Skip to the panel</a>
  ${state.connected ? nothing : html`<div class="banner" role="alert">The server does not answer. What you typed is kept; the page connects again by itself.</div>`}
  <header>
    <a class="brand" href="#playground" @click=${(event) => visit(event, "playground")}><img src="console/icon.svg" alt="" width="28" height="28" />Wane</a>
    <nav aria-label="Panels">
      ${PANELS.map((one) => html`<a href="#${one}" aria-current=${one === state.panel ? "page" : nothing} @click=${(event) => visit(event, one)}>${TITLES[one]}</a>`)}
    </nav>
    <div class="tools">
      <label class="model-choice">
        <span>Model</span>
        <select id="model" @change=${(event) => choose(event.target.value)} ?disabled=${!state.models}>
          ${state.model && !card() ? html`<option value=${state.model} selected>${state.model}${state.models ? " (not served)" : ""}</option>` : nothing}
          ${(state.models ?? []).map((one) => html`<option value=${one.id} .selected=${one.id === state.model}>${one.id}</option>`)}
        </select>
      </label>
      <div class="switch" role="group" aria-label="Theme">
        ${THEMES.map((one) => html`<button aria-pressed=${theme === one} @click=${() => setTheme(one)}>${one}</button>`)}
      </div>
    </div>
  </header>
  <main id="main" tabindex="-1" data-panel=${state.panel}>
    ${state.problem ? html`<p class="problem" role="status">${state.problem}</p>` : nothing}
    ${VIEWS[state.panel].view(tryModel)}
  </main>
  <footer>
    <a href="docs">API reference</a><a href="openapi.json">OpenAPI</a><a href="v1/models">Models as JSON</a><a href="v1/report">Report as JSON</a>
  </footer>
  ${keyDialog()}
`;

function tryModel(id) {
  choose(id);
  writePanel("playground");
  open();
}

function visit(event, panel) {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  writePanel(panel);
  open();
}

function setTheme(chosen) {
  theme = chosen;
  localStorage.setItem("wane-theme", theme);
  update();
}

function drawPage() {
  document.documentElement.dataset.theme = theme;
  document.title = `${TITLES[state.panel]} · Wane`;
  render(page(), document.querySelector("#app"));
  VIEWS[state.panel].drawn?.();
  const dialog = document.querySelector("#key-dialog");
  if (state.asksKey && !dialog.open) dialog.showModal();
  if (!state.asksKey && dialog.open) dialog.close();
}

// Shows the panel of the state.
function open() {
  if (state.panel !== shown) {
    VIEWS[shown]?.leave?.();
    shown = state.panel;
    if (state.models) VIEWS[shown].enter?.();
    if (state.models && shown === "models") load();
  }
  update();
}

// The page's own entries of the history only name the panel: going back never brings back an older text. An address
// that someone typed or followed has everything.
function route(event) {
  if (event.state?.own) {
    readPanel();
  } else {
    readAddress();
    fitWindow();
    if (state.models) playground.refresh();
  }
  open();
}

document.querySelector("#app").replaceChildren();
onUpdate(drawPage);
addEventListener("popstate", route);
addEventListener("resize", update);
addEventListener("keydown", (event) => event.key === "Escape" && playground.stop());
addEventListener("pagehide", playground.leavePage);
addEventListener("pageshow", (event) => event.persisted && playground.refresh());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
document.addEventListener("visibilitychange", () => {
  if (state.panel === "live") live.visible(!document.hidden);
  if (!document.hidden) watch();
});
playground.onUnknown(load);
route({ state: null });
load();
watch();
