// Requests with the key, streams of events, and the state of the connection.

export class ApiError extends Error {
	constructor(status, { message, param, code } = {}) {
		super(message ?? `the server answered with status ${status}`);
		Object.assign(this, { status, param: param ?? null, code: code ?? null });
	}
}

// The server does not answer, or an answer was cut off.
export class LostError extends Error {}

export const isExpected = (error) => error instanceof ApiError || error instanceof LostError;

const KEY = "infer.key";
export const key = {
	get: () => sessionStorage.getItem(KEY) ?? "",
	set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export const connection = new EventTarget(); // `state` is "ready", "loading", "lost" or "key"
connection.state = "loading";
connection.progress = 0;
connection.model = null; // from /props
connection.chosen = null; // the name of one of several models; null: the server's first

function become(state, progress = 0) {
	if (state !== "key" && state === connection.state && progress === connection.progress) return;
	connection.state = state;
	connection.progress = progress;
	connection.dispatchEvent(new Event("change"));
}

// The error of a body. Ollama's routes have its message in place of an object.
const errorOf = ({ error, code }) => (typeof error === "string" ? { message: error, code } : error);

async function fetched(path, options) {
	const headers = { ...(options.body ? { "Content-Type": "application/json" } : {}) };
	if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
	let response;
	try {
		response = await fetch(path, { ...options, headers });
	} catch (error) {
		if (error.name === "AbortError") throw error;
		watch();
		throw new LostError("the server does not answer");
	}
	if (response.ok) return response;
	const body = await response.json().catch(() => ({}));
	const failure = new ApiError(response.status, errorOf(body));
	if (response.status === 401) become("key");
	if (response.status === 503 && ["loading", "engine_died"].includes(failure.code)) {
		watch();
		throw new LostError(failure.message);
	}
	throw failure;
}

export async function get(path, signal) {
	return (await fetched(path, { signal })).json();
}

export async function post(path, body, signal) {
	return (await fetched(path, { method: "POST", body: JSON.stringify(body), signal })).json();
}

// Yields the texts of an answer that end with `end`.
async function* parts(path, body, signal, end) {
	const response = await fetched(path, { method: body ? "POST" : "GET", body: body && JSON.stringify(body), signal });
	const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
	let rest = "";
	try {
		for (;;) {
			const { value, done } = await reader.read();
			if (done) return;
			const found = (rest + value).split(end);
			rest = found.pop();
			yield* found;
		}
	} catch (error) {
		if (error.name === "AbortError") throw error;
		watch();
		throw new LostError(error.message);
	} finally {
		reader.cancel().catch(() => {});
	}
}

function checked(data) {
	const error = errorOf(data);
	if (!error?.message) return data;
	throw error.code === "engine_died" ? new LostError(error.message) : new ApiError(500, error);
}

// Yields the parsed data of each event until [DONE].
export async function* stream(path, body, signal) {
	for await (const event of parts(path, body, signal, "\n\n")) {
		if (event === "data: [DONE]") return;
		if (event.startsWith("data: ")) yield checked(JSON.parse(event.slice(6)));
	}
	if (signal?.aborted) return;
	watch();
	throw new LostError("the answer was cut");
}

// Yields each line of an answer, until the one with the status "success".
export async function* lines(path, body, signal) {
	for await (const line of parts(path, body, signal, "\n")) {
		const data = checked(JSON.parse(line));
		if (data.status === "success") return;
		yield data;
	}
	throw new LostError("the server did not finish");
}

// The path of a GET about the chosen model.
export function ofModel(path) {
	if (connection.chosen === null) return path;
	return `${path}${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(connection.chosen)}`;
}

// Polls until the server is ready, then reads its properties. The chosen model is loaded for it.
let isWatching = false;
export async function watch() {
	if (isWatching) return;
	isWatching = true;
	for (let wait = 0; ; wait = 700) {
		await new Promise((resolve) => setTimeout(resolve, wait));
		try {
			const response = await fetch("/health", { cache: "no-store" });
			const health = await response.json();
			if (response.ok) break;
			become(health.status === "draining" ? "lost" : "loading", health.progress ?? 0);
		} catch {
			become("lost");
		}
	}
	isWatching = false;
	if (connection.chosen !== null && connection.model?.model !== connection.chosen) become("loading");
	try {
		connection.model = await get(ofModel("/props"));
		become("ready");
	} catch (error) {
		if (error instanceof ApiError && error.status !== 401) become("lost");
	}
}
