// What the page knows. Every module reads and changes `state`, and then calls `update`, which draws the page again.

export const PANELS = ["playground", "forgetting", "live", "models"];

export const SAMPLE =
  "The history of the town goes back to the twelfth century , when a small church was built on the hill above the " +
  "river . The first bridge was made of wood , and it was destroyed by a flood in the winter of 1342 . A second " +
  "bridge , made of stone , was completed after a long dispute between the bishop and the merchants , who were asked " +
  "to pay for it . For more than two hundred years the market on its northern side was the largest in " +
  "the region , and the traders who came from the coast brought salt , wool and fish . During the war the town was " +
  "occupied twice . The population fell from about four thousand to less than nine hundred , and most of the houses " +
  "near the river were burned . It recovered slowly . In the eighteenth century a school was opened in the former " +
  "monastery , and the library of the school is still used by students";

export const state = {
  panel: "playground",
  models: null, // the list of /v1/models, or null while it loads
  model: null, // the name of the chosen model
  text: null, // what was typed, for a model of text
  events: [], // the names of the session's events, for a model of events
  k: null, // the number of tokens of the window
  key: sessionStorage.getItem("wane-key"),
  asksKey: false, // whether the API answered 401
  keyRefused: false,
  connected: true,
  problem: null, // why the list of models could not be read
};

let draw = () => {};
let planned = false;

export function onUpdate(drawing) {
  draw = drawing;
}

export function update() {
  if (planned) return;
  planned = true;
  queueMicrotask(() => {
    planned = false;
    draw();
  });
}

export const card = () => state.models?.find((one) => one.id === state.model) ?? null;
export const isEvents = () => card()?.vocabulary.kind === "events";

// The address keeps the panel, the model and the text behind `#`, which browsers never send to a server.
export function readPanel() {
  const [panel] = location.hash.slice(1).split("?");
  state.panel = PANELS.includes(panel) ? panel : "playground";
}

export function readAddress() {
  readPanel();
  const given = new URLSearchParams(location.hash.split("?").slice(1).join("?"));
  state.model = given.get("model") ?? state.model;
  state.text = given.get("text") ?? state.text ?? SAMPLE;
  state.k = Number(given.get("k")) || state.k;
  try {
    const names = JSON.parse(given.get("events") ?? "null");
    if (Array.isArray(names)) state.events = names.map(String);
  } catch {
    state.events = []; // someone edited the address
  }
}

function address() {
  const given = new URLSearchParams();
  if (state.model) given.set("model", state.model);
  if (state.k) given.set("k", state.k);
  if (isEvents()) given.set("events", JSON.stringify(state.events));
  else given.set("text", state.text);
  return `#${state.panel}?${given}`;
}

const OWN = { own: true }; // marks the entries of the browser's history that the page wrote
const APART_MS = 300; // browsers limit how often a page may write its address

let writing = null;
let writtenAt = -Infinity;

export function writeAddress() {
  clearTimeout(writing);
  writing = setTimeout(() => {
    writtenAt = performance.now();
    history.replaceState(OWN, "", address());
  }, Math.max(0, writtenAt + APART_MS - performance.now()));
}

// Opens a panel as a new entry of the browser's history.
export function writePanel(panel) {
  clearTimeout(writing);
  history.replaceState(OWN, "", address());
  state.panel = panel;
  history.pushState(OWN, "", address());
}
