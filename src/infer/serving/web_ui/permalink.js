// Links: a request and the hash of its answer. This page and `infer replay` can check them.

const VERSION = 1;

export async function makeLink({ route, fingerprint, body, text }) {
	const value = { v: VERSION, route, fingerprint, body, sha256: sha256(text) };
	const bytes = new TextEncoder().encode(JSON.stringify(value));
	let binary = "";
	for (let i = 0; i < bytes.length; i += 8192) binary += String.fromCharCode(...bytes.subarray(i, i + 8192));
	const encoded = btoa(binary).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
	return `${location.origin}/#r=${encoded}`;
}

// Returns null if the fragment holds no link. Throws an Error that says what is wrong with the link.
export function readLink(fragment) {
	if (!fragment.startsWith("#r=")) return null;
	let value;
	try {
		const binary = atob(fragment.slice(3).replace(/-/g, "+").replace(/_/g, "/"));
		value = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(binary, (c) => c.charCodeAt(0))));
	} catch {
		throw new Error("The link is damaged: the part after #r= is not base64url of JSON.");
	}
	const routes = ["/v1/chat/completions", "/v1/completions"];
	check(value?.v === VERSION, `its version must be ${VERSION}, not ${JSON.stringify(value?.v)?.slice(0, 40)}`);
	check(routes.includes(value.route), `its route must be ${routes.join(" or ")}`);
	check(isObject(value.body), "it has no request (body)");
	checkBody(value.body, value.route === routes[0]);
	return value;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isList = (value, isRight) => Array.isArray(value) && value.every(isRight);
const isFunction = (value) => typeof value?.function?.name === "string";
const isCall = (value) => isFunction(value) && typeof value.function.arguments === "string";

function check(isRight, fault) {
	if (!isRight) throw new Error(`The link cannot be answered: ${fault}.`);
}

function checkBody({ messages, prompt, tools, seed }, isChat) {
	check(Number.isSafeInteger(seed ?? 0), "its seed must be an integer below 2^53 (`infer replay` takes larger ones)");
	check(isList(tools ?? [], isFunction), "each of its tools must have a function with a name");
	if (!isChat) return check(typeof prompt === "string" || isList(prompt, Number.isInteger), "its prompt must be a text or a list of token ids");
	check(isList(messages, isObject) && messages.length, messages === undefined ? "it has no messages" : "its messages must be a list of one or more objects");
	messages.forEach(({ role, content, tool_calls }, index) => {
		const name = `message ${index + 1}`;
		check(ROLES.includes(role), `the role of ${name} must be one of ${ROLES.join(", ")}`);
		const isText = typeof (content ?? "") === "string" || isList(content, (part) => typeof part?.text === "string");
		check(isText, `the content of ${name} must be a text or a list of texts`);
		check(isList(tool_calls ?? [], isCall), `each tool call of ${name} must have a function with a name and arguments`);
	});
}

const ROLES = ["system", "developer", "user", "assistant", "tool"];
export const isSystem = ({ role }) => role === "system" || role === "developer";

// Returns a message's text. Its content may have parts.
export const textOf = ({ content }) => (typeof content === "string" ? content : (content ?? []).map((part) => part.text).join(""));

// FIPS 180-4 over UTF-8. The browser's own function needs https or localhost.
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
