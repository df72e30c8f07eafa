// The request of the Playground as commands that can be copied.

import { html } from "./vendor/lit-html.js";
import { isEvents, state, update } from "./state.js";
import { url } from "./api.js";

const here = { language: "curl", copied: false };

function body() {
  const given = isEvents() ? { events: state.events } : { input: state.text };
  return { ...given, model: state.model, mode: "both", window: state.k, prove: true };
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

// JSON with the words of Python.
const python = (value) => {
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  return JSON.stringify(value);
};

export function recipe(language) {
  const base = url("").replace(/\/$/, "");
  if (language === "curl") {
    const key = state.key ? ` \\\n  -H "authorization: Bearer $WANE_API_KEY"` : "";
    return `curl -s ${base}/v1/predict -H 'content-type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body()))}`;
  }
  const [[, given], ...options] = Object.entries(body());
  return [
    "from wane_client import Wane  # pip install ./client",
    "",
    ...(state.key ? ["# The client reads the key from the environment variable WANE_API_KEY."] : []),
    `wane = Wane("${base}")`,
    "answer = wane.predict(",
    `    ${python(given)},`,
    ...options.map(([name, value]) => `    ${name}=${python(value)},`),
    ")",
    "print(answer.modes[\"recurrent\"].predictions[0], answer.agreement)",
  ].join("\n");
}

async function copy() {
  const text = recipe(here.language);
  try {
    await navigator.clipboard.writeText(text);
    here.copied = true;
  } catch {
    getSelection().selectAllChildren(document.querySelector("#recipe")); // without HTTPS, a page may not copy
    here.copied = false;
  }
  update();
}

export const recipes = () => html`
  <details class="card recipes">
    <summary>Copy this request as a command</summary>
    <div class="head">
      <div class="switch" role="group" aria-label="Language">
        ${["curl", "Python"].map(
          (name) => html`<button
            aria-pressed=${here.language === name}
            @click=${() => (Object.assign(here, { language: name, copied: false }), update())}
          >${name}</button>`,
        )}
      </div>
      <button id="copy" @click=${copy}>${here.copied ? "Copied" : "Copy"}</button>
    </div>
    <pre id="recipe" tabindex="0" aria-label="Command">${recipe(here.language)}</pre>
  </details>
`;
