// The names of a model's events: the box that completes them, and their ids.

import { Failure, call } from "./api.js";
import { html, nothing } from "./vendor/lit-html.js";
import { state, update } from "./state.js";

const LISTED = 8;
const ASKED = 100; // more than are listed, so that the name itself is found before the longer ones
const PAGE = 10_000;

let ids = new Map(); // by name
let model = null;
const box = { text: "", names: [], active: -1, asked: 0, problem: null, searching: false, entered: null };

function table() {
  if (model !== state.model) [ids, model] = [new Map(), state.model];
  return ids;
}

export const known = (name, id) => table().set(name, id);

// Returns the id of an event. Raises Failure if the model does not have it.
export async function idOf(name) {
  let after = -1;
  while (!table().has(name)) {
    const page = await list(name, PAGE, after);
    if (page.next === null && !table().has(name)) throw new Failure(`The model ${state.model} has no event “${name}”.`);
    after = page.next;
  }
  return table().get(name);
}

async function list(prefix, limit, after = -1) {
  const given = new URLSearchParams({ prefix, limit });
  if (after >= 0) given.set("after", after);
  const page = await call(`v1/models/${encodeURIComponent(state.model)}/vocabulary?${given}`);
  for (const one of page.events) known(one.name, one.id);
  return page;
}

// Lists the names that begin with a text, the text itself first. Enter meanwhile chooses the first of them.
async function search(text) {
  Object.assign(box, { text, searching: true, entered: null });
  const asked = (box.asked += 1);
  try {
    const { events } = await list(text, ASKED);
    if (asked !== box.asked) return;
    const names = events.map((one) => one.name);
    box.names = [...names.filter((name) => name === text), ...names.filter((name) => name !== text)].slice(0, LISTED);
    box.problem = text && !events.length ? "No event of this model begins with this text." : null;
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    if (asked !== box.asked) return;
    box.names = [];
    box.problem = error.message;
  }
  box.searching = false;
  if (box.entered && box.names.length) return choose(box.names[0], box.entered);
  box.active = box.names.length && text ? 0 : -1;
  update();
}

function choose(name, chosen) {
  Object.assign(box, { text: "", names: [], active: -1, problem: null, searching: false, entered: null });
  box.asked += 1;
  chosen(name);
}

export function chooser(chosen, stop) {
  const keys = (event) => {
    const count = box.names.length;
    if (event.key === "ArrowDown" && !count) search(box.text);
    else if (event.key === "ArrowDown" && count) box.active = (box.active + 1) % count;
    else if (event.key === "ArrowUp" && count) box.active = (box.active + count - 1) % count;
    else if (event.key === "Enter" && box.searching && box.text) box.entered = chosen;
    else if (event.key === "Enter" && box.names[box.active] !== undefined) choose(box.names[box.active], chosen);
    else if (event.key === "Escape") {
      stop();
      box.names = [];
    } else return;
    event.preventDefault();
    update();
  };
  return html`
    <div class="chooser">
      <label for="event">Add an event</label>
      <input
        id="event"
        role="combobox"
        autocomplete="off"
        spellcheck="false"
        placeholder="Begin to type its name"
        aria-controls="event-names"
        aria-expanded=${box.names.length > 0}
        aria-autocomplete="list"
        aria-activedescendant=${box.active >= 0 ? `event-name-${box.active}` : nothing}
        .value=${box.text}
        @input=${(event) => search(event.target.value)}
        @focus=${() => search(box.text)}
        @blur=${() => setTimeout(() => ((box.names = []), update()), 150)}
        @keydown=${keys}
      />
      <ul id="event-names" role="listbox" aria-label="Names of events" ?hidden=${!box.names.length}>
        ${box.names.map(
          (name, index) => html`<li
            id="event-name-${index}"
            role="option"
            aria-selected=${index === box.active}
            @mousedown=${(event) => (event.preventDefault(), choose(name, chosen))}
          >${name}</li>`,
        )}
      </ul>
      <div role="status">${box.problem ? html`<p class="problem">${box.problem}</p>` : nothing}</div>
    </div>
  `;
}
