// A link that holds a request, and the hash of its answer: the same bits on any machine, by this page or `infer replay`.

const VERSION = 1;

export async function makeLink({ route, fingerprint, body, text }) {
  const value = { v: VERSION, route, fingerprint, body, sha256: sha256(text) };
  const bytes = new TextEncoder().encode(JSON.stringify(value));
  let binary = "";
  for (let i = 0; i < bytes.length; i += 8192) binary += String.fromCharCode(...bytes.subarray(i, i + 8192));
  const encoded = btoa(binary).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
  return `${location.origin}/#r=${encoded}`;
}

// Null where the fragment holds no link. Throws an Error that says what is wrong with one.
export function readLink(fragment) {
  if (!fragment.startsWith("#r=")) return null;
  let value;
  try {
    const binary = atob(fragment.slice(3).replace(/-/g, "+").replace(/_/g, "/"));
    value = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(binary, (c) => c.charCodeAt(0))));
  } catch {
    throw new Error("the link is broken: what follows #r= is no base64url of JSON");
  }
  const routes = ["/v1/chat/completions", "/v1/completions"];
  if (value?.v !== VERSION) throw new Error(`the link has version ${value?.v}, this page reads ${VERSION}`);
  if (!routes.includes(value.route)) throw new Error(`the link's route must be one of ${routes.join(", ")}`);
  if (typeof value.body !== "object" || value.body === null) throw new Error("the link has no body");
  if (!Number.isSafeInteger(value.body.seed ?? 0)) throw new Error("the link's seed has more digits than a browser keeps: `infer replay` answers it");
  return value;
}

// FIPS 180-4, of a text's UTF-8. The browser's own needs https or localhost.
export function sha256(text) {
  const bytes = new TextEncoder().encode(text);
  const padded = new Uint8Array(((bytes.length + 8) >> 6 << 6) + 64);
  padded.set(bytes);
  padded[bytes.length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setUint32(padded.length - 8, Math.floor(bytes.length / 2 ** 29));
  view.setUint32(padded.length - 4, bytes.length << 3);
  const state = new Uint32Array(INITIAL);
  const words = new Uint32Array(64);
  for (let block = 0; block < padded.length; block += 64) {
    for (let i = 0; i < 16; i++) words[i] = view.getUint32(block + 4 * i);
    compress(state, words);
  }
  return Array.from(state, (word) => word.toString(16).padStart(8, "0")).join("");
}

function compress(state, words) {
  const turn = (x, by) => (x >>> by) | (x << (32 - by));
  for (let i = 16; i < 64; i++) {
    const [x, y] = [words[i - 15], words[i - 2]];
    const small = turn(x, 7) ^ turn(x, 18) ^ (x >>> 3);
    words[i] = words[i - 16] + small + words[i - 7] + (turn(y, 17) ^ turn(y, 19) ^ (y >>> 10));
  }
  let [a, b, c, d, e, f, g, k] = state;
  for (let i = 0; i < 64; i++) {
    const one = k + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + CUBES[i] + words[i];
    const two = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    [k, g, f, e, d, c, b, a] = [g, f, e, (d + one) | 0, c, b, a, (one + two) | 0];
  }
  [a, b, c, d, e, f, g, k].forEach((word, i) => (state[i] += word));
}

function primes(count) {
  const found = [];
  for (let n = 2; found.length < count; n++) if (found.every((p) => n % p)) found.push(n);
  return found;
}
const fraction = (x) => Math.floor((x - Math.floor(x)) * 2 ** 32);
const INITIAL = primes(8).map((p) => fraction(Math.sqrt(p)));
const CUBES = primes(64).map((p) => fraction(Math.cbrt(p)));
