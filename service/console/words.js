// Numbers and tokens as people read them.

import { html } from "./vendor/lit-html.js";

export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 2 : 1)}%`;
export const ms = (value) => (value == null ? "–" : `${value < 10 ? value.toFixed(2) : value.toFixed(0)} ms`);
export const count = (value) => value.toLocaleString("en");
export const points = (difference) => `${difference > 0 ? "+" : "−"}${Math.abs(100 * difference).toFixed(2)}`;

export function small(value) {
  if (value == null) return "–";
  if (value === 0) return "0";
  return value >= 0.001 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

// What an error bound promises.
export function bound(value) {
  if (value == null) return "none";
  if (value === 0) return "0 (exact)";
  return value >= 1 ? "1 (no promise)" : small(value);
}

// A token with its spaces and line breaks made visible.
export function token(prediction) {
  if (prediction.bytes) {
    const bytes = prediction.bytes.map((one) => one.toString(16).padStart(2, "0")).join(" ");
    return html`<span class="token" title="a part of a character">bytes ${bytes}</span>`;
  }
  const parts = prediction.token.split(/([ \n]+)/).filter(Boolean);
  return html`<span class="token">${parts.map((part) =>
    /^[ \n]+$/.test(part) ? html`<span class="space">${part.replaceAll(" ", "␣").replaceAll("\n", "↵")}</span>` : part,
  )}</span>`;
}

// The windows of a slider or a chart: two for each power of two, up to `most`.
export function windows(most, half = true) {
  const found = [];
  for (let k = 1; k <= most; k *= 2) {
    found.push(k);
    if (half && k > 1 && k * 1.5 <= most) found.push(k * 1.5);
  }
  if (found.at(-1) !== most) found.push(most);
  return found;
}
