// Reads /sojourn/v1 of the server that served this file. The API key goes into a header, never into an address.

const API = new URL("../v1/", import.meta.url);
const KEY = "sojourn-api-key"; // in the tab's session storage
const RETRY_MS = [1000, 2000, 5000, 10000, 30000];
const POLL_MS = 5000; // between two single frames while the server has no free stream
const SILENT_MS = 60000; // a stream without a frame for this long is opened again

export class ApiFailure extends Error {
  constructor(status, message, next) {
    super(message);
    this.status = status;
    this.next = next;
  }
}

export const apiKey = () => sessionStorage.getItem(KEY);
export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

async function ask(path, signal) {
  const key = apiKey();
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(new URL(path, API), { headers, signal, cache: "no-store", credentials: "same-origin" });
  if (answer.ok) return answer;
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // Not an answer of sojourn, for instance of a proxy.
  }
  throw new ApiFailure(answer.status, error.message ?? `status ${answer.status}`, error.next ?? "see the server's log");
}

export async function getJson(path, signal) {
  return (await ask(path, signal)).json();
}

export const programPath = (id, more = "") => `programs/${encodeURIComponent(id)}${more}`;

// Reads the live stream from start() to stop(), and connects again after failures.
export class LiveStream {
  // onFrame(frame); onState(state, failure): connecting, live, waiting, denied, paused.
  constructor(onFrame, onState) {
    this.onFrame = onFrame;
    this.onState = onState;
    this.abort = null;
  }

  start() {
    this.stop();
    const abort = new AbortController();
    this.abort = abort;
    this.run(abort.signal);
  }

  stop() {
    this.abort?.abort();
    this.abort = null;
  }

  async run(signal) {
    for (let failures = 0; !signal.aborted; ) {
      let pauseMs = 0;
      try {
        if (!failures) this.onState("connecting");
        await this.read(signal, () => {
          failures = 0;
        });
        failures = 1; // the server ended the stream
        this.onState("waiting", new ApiFailure(0, "the server ended the stream", "connecting again"));
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401 || error.status === 403) {
          this.onState("denied", error);
          return;
        }
        if (error.status === 429) {
          pauseMs = POLL_MS;
          await this.poll(signal, error);
        } else {
          failures += 1;
          const words = error instanceof ApiFailure ? error : new ApiFailure(0, "the server does not answer", "connecting again");
          this.onState("waiting", words);
        }
      }
      await pause(pauseMs || RETRY_MS[Math.min(failures, RETRY_MS.length) - 1] || RETRY_MS[0], signal);
    }
  }

  async read(signal, onFirst) {
    const silence = new AbortController();
    let timer = setTimeout(() => silence.abort(), SILENT_MS);
    try {
      const answer = await ask("stream", AbortSignal.any([signal, silence.signal]));
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      const parts = [];
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        parts.push(value);
        // An event ends with an empty line, which two chunks may share.
        if (!value.includes("\n") && !parts.at(-2)?.endsWith("\n")) continue;
        const events = parts.join("").split("\n\n");
        parts.length = 0;
        parts.push(events.pop());
        for (const event of events) {
          if (!event.startsWith("data: ")) continue;
          clearTimeout(timer);
          timer = setTimeout(() => silence.abort(), SILENT_MS);
          onFirst();
          this.onState("live");
          this.onFrame(JSON.parse(event.slice(6)));
        }
      }
    } finally {
      clearTimeout(timer);
    }
  }

  // Gets a single frame, because the server has no free stream.
  async poll(signal, taken) {
    try {
      const frame = await getJson("stream?once=1", signal);
      this.onState("live", taken);
      this.onFrame(frame);
    } catch (error) {
      if (!signal.aborted) this.onState("waiting", error);
    }
  }
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}
