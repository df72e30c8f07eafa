// Calls of the API. Every failure is a `Failure` with words that the page can show.

import { state, update } from "./state.js";

export class Failure extends Error {
  constructor(message, { status = 0, code = "", document = {} } = {}) {
    super(message);
    Object.assign(this, { status, code, document });
  }
}

export const LOST = "lost"; // the code of a failure without an answer
export const UNAUTHORIZED = 401;

export const url = (path) => new URL(path, document.baseURI).href;

export async function call(path, { body, method, signal, quiet } = {}) {
  const response = await answer(path, { body, method, signal, quiet });
  const type = response.headers.get("content-type") ?? "";
  if (response.status === 204) return null;
  return type.includes("json") ? response.json() : response.text();
}

// Returns the response if it is a success. Raises Failure.
export async function answer(path, { body, method, signal, keepalive, quiet } = {}) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (state.key) headers.authorization = `Bearer ${state.key}`;
  let response;
  try {
    response = await fetch(url(path), {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      keepalive,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server does not answer.", { code: LOST });
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  const document = said.error?.message ? { detail: said.error.message, code: said.error.code, ...said } : said;
  if (document.code === "model_not_found") document.code = "unknown_model"; // OpenAI's name for the same failure
  document.retry_after_s ??= Number(response.headers.get("retry-after")) || undefined;
  throw failed(document, response.status, quiet);
}

// Returns the failure of a problem document.
export function failed(document, status = document.status, quiet = false) {
  const { code } = document;
  if (status === UNAUTHORIZED && !quiet) askForKey();
  return new Failure(words(document, status), { status, code, document });
}

function words(document, status) {
  const said = document.detail ?? `The server answered ${status}.`;
  const sentence = said.charAt(0).toUpperCase() + said.slice(1) + (/[.!?]$/.test(said) ? "" : ".");
  const wait = document.retry_after_s;
  if (status === 401) return "The server wants an API key.";
  if (status === 429) return `The server is busy or this key has used up its rate: ${sentence} ${wait ? `The page tries again in ${wait} s.` : ""}`;
  if (status === 413) return `The text is too long for one request: ${sentence}`;
  if (document.code === "unknown_model") return `The server no longer has this model: ${sentence} Choose another one above.`;
  return sentence;
}

export function askForKey() {
  state.keyRefused = state.key !== null;
  state.asksKey = true;
  update();
}

// Yields the name and the data of each server-sent event.
export async function* events(path, body, signal) {
  const response = await answer(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let read;
      try {
        read = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new Failure("The server went away while it generated.", { code: LOST });
      }
      if (read.done) return;
      const parts = (rest + read.value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const [name, data] = part.split("\n");
        yield [name.slice("event: ".length), JSON.parse(data.slice("data: ".length))];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
