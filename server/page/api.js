// Talks with the server: the key, JSON requests, and server-sent events over fetch, which can carry a header.

const KEY = "cellserve-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The answer, whose status is 2xx. Raises Refused with the server's own words. */
async function answer(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
  });
  if (!response.ok) {
    const text = await response.text();
    throw new Refused(response.status, message(text) ?? `the server answered ${response.status}`);
  }
  return response;
}

function message(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return undefined;
  }
}

export const json = async (path, options) => (await answer(path, options)).json();

/** Each event's object, until the server ends the stream. An error event raises Refused. */
export async function* events(path, options) {
  const response = await answer(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        const data = part.slice(6);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Refused(200, event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What /ready says, which needs no key: {phase, done, of}, or null where nothing answers. */
export async function phase() {
  try {
    const response = await fetch("ready", { cache: "no-store" });
    return await response.json();
  } catch {
    return null;
  }
}
