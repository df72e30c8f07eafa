// A session on the server that follows the page's tokens. It uses the session's WebSocket, and sends only what changed.

import { Failure, LOST, answer, call, failed, url } from "./api.js";
import { state } from "./state.js";

export const TOP_K = 8;
const UNAUTHORIZED_CLOSE = 1008;

export class Session {
  constructor(model) {
    this.model = model;
    this.id = null;
    this.tokens = []; // the tokens that the server has appended
    this.socket = null;
    this.refusal = null; // why the server closes the socket
    this.waiting = []; // the resolve and reject functions of the messages without an answer, in order
    this.onLost = () => {};
  }

  // Brings the session to these tokens, and returns the answer after the last one. Raises Failure.
  async follow(tokens) {
    await this.open();
    let same = 0;
    while (same < tokens.length && tokens[same] === this.tokens[same]) same += 1;
    const answers = [];
    if (same < this.tokens.length) answers.push(this.send({ rewind: same }));
    const rest = tokens.slice(same);
    if (rest.length) answers.push(this.send({ tokens: rest, expected_position: same, top_k: TOP_K }));
    if (!answers.length) return null;
    const settled = await Promise.allSettled(answers);
    const wrong = settled.find((one) => one.status === "rejected");
    if (!wrong) {
      this.tokens = tokens;
      return settled.at(-1).value;
    }
    const { status, code, document } = wrong.reason;
    if (status === 422 && document.field === "position") {
      await this.create(tokens); // the server no longer has the tokens to which the session would be rewound
      return null;
    }
    if (status === 404 && code === "unknown_session") {
      await this.create(tokens); // the session has expired
      return null;
    }
    this.close();
    throw wrong.reason;
  }

  // Makes sure that the session exists at the position of `tokens`, and that its socket is open.
  async open() {
    if (this.socket?.readyState === WebSocket.OPEN) return;
    if (this.id === null) await this.create([]);
    else await this.resume();
    await this.connect();
  }

  // After a lost connection: the session goes on at its position, or is created again from the page's tokens.
  async resume() {
    try {
      const found = await call(`v1/sessions/${this.id}`);
      if (found.position !== this.tokens.length) await this.create(this.tokens);
    } catch (error) {
      if (error.status !== 404) throw error;
      await this.create(this.tokens);
    }
  }

  // Creates the session from the last `keep` of the tokens, which all count in its position.
  async create(tokens, keep = tokens.length) {
    const old = this.id;
    this.close();
    if (old !== null) await call(`v1/sessions/${old}`, { method: "DELETE" }).catch((error) => {
      if (error.status !== 404) throw error;
    });
    this.id = null;
    const past = tokens.length ? { history: tokens.slice(-keep), position: tokens.length } : {};
    const made = await call("v1/sessions", { body: { model: this.model, ...past } });
    this.id = made.session;
    this.tokens = tokens;
    return made;
  }

  // Starts another session from this one's tokens, and returns it. Raises Failure.
  async fork() {
    const made = await call(`v1/sessions/${this.id}/fork`, { body: {} });
    return Object.assign(new Session(this.model), { id: made.session, tokens: this.tokens });
  }

  connect() {
    const protocols = ["wane"];
    if (state.key) protocols.push(`base64url.bearer.authorization.k8s.io.${encoded(state.key)}`);
    const socket = new WebSocket(url(`v1/sessions/${this.id}/stream`).replace(/^http/, "ws"), protocols);
    this.socket = socket;
    this.refusal = null;
    return new Promise((resolve, reject) => {
      socket.onopen = resolve;
      socket.onmessage = (message) => this.receive(JSON.parse(message.data));
      socket.onclose = (event) => {
        const lost = new Failure("The connection to the server was lost.", { code: LOST });
        const why = this.refusal ?? (event.code === UNAUTHORIZED_CLOSE ? failed({ status: 401 }) : lost);
        for (const one of this.waiting.splice(0)) one.reject(why);
        reject(why);
        if (this.socket === socket) {
          this.socket = null;
          this.onLost(event.code);
        }
      };
    });
  }

  send(message) {
    return new Promise((resolve, reject) => {
      this.waiting.push({ resolve, reject });
      this.socket.send(JSON.stringify(message));
    });
  }

  receive(message) {
    const one = this.waiting.shift();
    if (message.error && !one) this.refusal = failed(message.error); // the server closes the socket next
    else if (message.error) one.reject(failed(message.error));
    else one?.resolve(message);
  }

  close() {
    const { socket } = this;
    this.socket = null;
    socket?.close();
  }

  // Deletes the session, also while the page is being closed.
  remove() {
    this.close();
    if (this.id === null) return;
    answer(`v1/sessions/${this.id}`, { method: "DELETE", keepalive: true, quiet: true }).catch(() => {});
    this.id = null;
    this.tokens = [];
  }
}

const encoded = (key) =>
  btoa(String.fromCharCode(...new TextEncoder().encode(key))).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
