// The daemon's events, for as long as the page is open: read with fetch, because EventSource cannot send a token.

const SILENCE_MS = 10_000; // stats come every second: whoever is silent for so long is gone
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 5_000;

export class Denied extends Error {}

/** Headers for requests to the daemon. */
export function credentials(token) {
  return token ? { Authorization: `Bearer ${token}` } : {};
}

/**
 * Follow `path` until the token is refused, which throws `Denied`.
 *
 * `onEvent(kind, data)` gets every event; `onState("live" | "lost")` how the connection is.
 */
export async function follow(path, token, onEvent, onState) {
  let last = "";
  let wait = FIRST_RETRY_MS;
  for (;;) {
    try {
      await connect(path, token, last, (id) => (last = id), (kind, data) => {
        wait = FIRST_RETRY_MS;
        onState("live");
        onEvent(kind, data);
      });
    } catch (error) {
      if (error instanceof Denied) throw error;
    }
    onState("lost");
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(2 * wait, LAST_RETRY_MS);
  }
}

async function connect(path, token, last, onId, onEvent) {
  const silence = new AbortController();
  let alarm = setTimeout(() => silence.abort(), SILENCE_MS);
  try {
    const resume = last ? { "Last-Event-ID": last } : {};
    const headers = { Accept: "text/event-stream", ...resume, ...credentials(token) };
    const response = await fetch(path, { headers, signal: silence.signal, cache: "no-store" });
    if (response.status === 401 || response.status === 403) throw new Denied((await response.json()).detail);
    if (!response.ok) return;
    const lines = new Lines();
    const parser = new Parser(onId, onEvent);
    for (const reader = response.body.getReader(); ; ) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(alarm);
      alarm = setTimeout(() => silence.abort(), SILENCE_MS);
      for (const line of lines.take(value)) parser.line(line);
    }
  } finally {
    clearTimeout(alarm);
    silence.abort();
  }
}

/** Cuts chunks of bytes into lines. */
class Lines {
  #decoder = new TextDecoder();
  #rest = "";

  take(chunk) {
    const lines = (this.#rest + this.#decoder.decode(chunk, { stream: true })).split("\n");
    this.#rest = lines.pop();
    return lines;
  }
}

/** Puts lines together to events. */
class Parser {
  #onId;
  #onEvent;
  #kind = "";
  #data = [];

  constructor(onId, onEvent) {
    this.#onId = onId;
    this.#onEvent = onEvent;
  }

  line(line) {
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "id") this.#onId(value);
    else if (field === "event") this.#kind = value;
    else if (field === "data") this.#data.push(value);
    else if (line === "") this.#end();
  }

  #end() {
    if (this.#data.length) this.#onEvent(this.#kind, JSON.parse(this.#data.join("\n")));
    this.#kind = "";
    this.#data = [];
  }
}
