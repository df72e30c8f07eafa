// The panel Models: a card for each model, with its quality, its window and its certificate.

import { Failure, call } from "./api.js";
import { html, nothing } from "./vendor/lit-html.js";
import { state, update } from "./state.js";
import { count } from "./words.js";

const here = { versions: [], problem: null };

export async function enter() {
  try {
    here.versions = await call("v2/repository/index", { body: {} });
    here.problem = null;
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    here.problem = error.message;
  }
  update();
}

export const view = (choose) => html`
  <section class="intro">
    <h1>Models</h1>
    <p>
      A <b>certified</b> model provably forgets: from its weights alone it follows how far an answer from the last k tokens
      can be from the answer after all tokens, for every text.
    </p>
  </section>
  ${here.problem ? html`<p class="problem" role="status">${here.problem}</p>` : nothing}
  ${state.models ? html`<div class="cards">${state.models.map((model) => one(model, choose))}</div>` : html`<p class="empty">Loading …</p>`}
`;

function one(model, choose) {
  const { certificate } = model;
  const standing = certificate.certified ? "certified" : certificate.contractive ? "contractive" : "not certified";
  const versions = here.versions.filter((version) => version.name === model.id);
  return html`
    <article class="card model" aria-labelledby="model-${model.id}">
      <div class="head">
        <h2 id="model-${model.id}">${model.id}</h2>
        <span class="badge ${certificate.certified ? "good" : ""}">${standing}</span>
      </div>
      <p>${model.description}</p>
      <dl class="facts">
        ${quality(model).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
        <div><dt>Window</dt><dd>${count(model.k)} <span class="muted">of ${count(model.max_window)}</span></dd></div>
        <div><dt>Cell</dt><dd>${model.family}</dd></div>
        <div><dt>Vocabulary</dt><dd>${count(model.vocabulary.size)} <span class="muted">${model.vocabulary.kind}</span></dd></div>
      </dl>
      ${certificate.certified || certificate.contractive
        ? html`<div class="scroll" tabindex="0" role="region" aria-label="Windows with a certified bound, ${model.id}"><table>
            <thead><tr><th>Certified error</th>${Object.keys(model.k_epsilon).map((epsilon) => html`<th class="number">${Number(epsilon)}</th>`)}</tr></thead>
            <tbody><tr><th scope="row">Smallest window</th>${Object.values(model.k_epsilon).map((k) => html`<td class="number">${k ?? "–"}</td>`)}</tr></tbody>
          </table></div>`
        : nothing}
      ${certificate.reason ? html`<p class="muted reason">Why there is no certificate: ${certificate.reason}.</p>` : nothing}
      <div class="head foot">
        <span class="muted">
          ${versions.length
            ? versions.map((version) => html`<span class="version">version ${version.version} · ${version.state.toLowerCase()}${version.reason ? ` (${version.reason})` : ""}</span> `)
            : `version ${model.model_version}`}
        </span>
        <button @click=${() => choose(model.id)} aria-label="Try ${model.id}">Try it</button>
      </div>
    </article>
  `;
}

// The perplexity on the test part, per word where the vocabulary has words or parts of words.
function quality({ quality: found }) {
  const { per_word: perWord, per_token: perToken } = found?.recurrent?.test ?? found?.recurrent?.valid ?? {};
  const [value, unit] = perWord ? [perWord, "per word"] : [perToken, "per token"];
  return value ? [["Perplexity", html`${value.toFixed(1)} <span class="muted">${unit}</span>`]] : [];
}
