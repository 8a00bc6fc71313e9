// One answer: a seeded request, its stream, and its continuation from any token with the same bits.

import { isExpected, LostError, post, stream } from "./api.js";
import { SHARED } from "./parameters.js";
import { TokenText } from "./tokens.js";

let count = 0;
export const randomSeed = () => Math.floor(Math.random() * 2 ** 53);

export class Answer extends EventTarget {
	constructor(route, body) {
		super();
		this.id = String(count++);
		Object.assign(this, { route, body, promptIds: null, numCached: null, fingerprint: null, expectedHash: null });
		Object.assign(this, { state: "waiting", error: null, finish: null, askedAt: 0, branchedAt: null, traces: new Map() });
		Object.assign(this, { differsAt: null, otherwise: null }); // marks
		this.begin();
	}

	begin() {
		this.tokens = []; // {id, bytes, origin, logprob, top}
		this.tokenText = new TokenText();
		Object.assign(this, { content: "", reasoning: "", calls: [], numPrompt: null, firstAt: 0, lastAt: 0, numTimed: 0 });
	}

	get isChat() {
		return this.route === "/v1/chat/completions";
	}

	get isRunning() {
		return this.state === "waiting" || this.state === "streaming";
	}

	get ids() {
		return this.tokens.map((token) => token.id);
	}

	// True if the answer was cut off by its length, the user or a lost connection.
	get canContinue() {
		return !this.isRunning && this.tokens.length > 0 && (this.finish === "length" || this.finish === null);
	}

	changed() {
		this.dispatchEvent(new Event("change"));
	}

	async run() {
		this.begin();
		const options = { stream: true, stream_options: { include_usage: true }, return_token_ids: true };
		const isHeld = this.body.response_format || this.body.regex || this.body.grammar || this.body.choice || this.body.tools;
		const logprobs = isHeld ? {} : this.isChat ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 }; // a forced token has none
		await this.read(this.route, { ...this.body, ...options, ...logprobs });
	}

	// Returns an answer with the first `position` tokens of `other`, then this token.
	static branch(other, position, token) {
		const answer = new Answer(other.route, { ...other.body });
		Object.assign(answer, { promptIds: other.promptIds, branchedAt: { position, id: token.id } });
		answer.given = other.tokens.slice(0, position);
		answer.running = answer.goOn([...answer.given.map((each) => each.id), token.id]);
		return answer;
	}

	// Continues after the present tokens, with more room if the length cut the answer off.
	async resume() {
		if (!this.tokens.length) return this.run();
		const { ids } = this;
		if (this.finish === "length") {
			const most = Math.max(this.body.max_tokens ?? 0, ids.length) + (this.body.max_tokens ?? 256);
			this.body = { ...this.body, max_tokens: most };
		}
		this.given = this.tokens;
		await this.goOn(ids);
	}

	async goOn(ids) {
		await this.read("/v1/branch", { ...this.sharedBody(), answer_token_ids: ids, position: ids.length, stream: true });
	}

	sharedBody() {
		return Object.fromEntries(SHARED.filter((name) => this.body[name] !== undefined).map((name) => [name, this.body[name]]));
	}

	async read(path, body) {
		this.abort = new AbortController();
		Object.assign(this, { state: "waiting", error: null, finish: null, askedAt: performance.now(), firstAt: 0, numTimed: 0 });
		this.changed();
		try {
			let isFirst = true;
			for await (const chunk of stream(path, body, this.abort.signal)) {
				if (isFirst && path === "/v1/branch") this.begin();
				isFirst = false;
				this.take(chunk);
			}
			this.state = this.abort.signal.aborted ? "stopped" : "done";
		} catch (error) {
			if (error.name === "AbortError") this.state = "stopped";
			else {
				this.state = error instanceof LostError ? "lost" : "failed";
				this.error = error;
				if (!isExpected(error)) console.error(error);
			}
		}
		this.changed();
	}

	stop() {
		this.abort?.abort();
	}

	take(chunk) {
		this.fingerprint = chunk.system_fingerprint ?? this.fingerprint;
		this.promptIds = chunk.prompt_token_ids ?? chunk.choices?.[0]?.prompt_token_ids ?? this.promptIds;
		if (chunk.usage) {
			this.numCached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
			this.numPrompt = chunk.usage.prompt_tokens;
		}
		const choice = chunk.choices ? chunk.choices[0] : chunk;
		if (!choice) return;
		const delta = choice.delta ?? choice;
		this.content += delta.content ?? choice.text ?? "";
		this.reasoning += delta.reasoning_content ?? "";
		for (const call of delta.tool_calls ?? []) this.takeCall(call);
		this.takeTokens(choice);
		this.finish = choice.finish_reason ?? this.finish;
		if (this.state === "waiting" && this.tokens.length) this.state = "streaming";
		this.changed();
	}

	takeCall({ index, id, function: part }) {
		const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
		call.id ||= id ?? "";
		call.name += part?.name ?? "";
		call.arguments += part?.arguments ?? "";
	}

	takeTokens(choice) {
		const scores = scoresOf(choice.logprobs);
		(choice.token_ids ?? []).forEach((id, index) => {
			const { logprob = null, top = null } = scores[index] ?? {};
			const before = this.given?.[this.tokens.length];
			const token = { id, bytes: choice.token_bytes[index], origin: choice.token_origins[index], logprob, top };
			this.tokens.push(token.origin === "given" && before?.id === id ? before : token);
			this.tokenText.push(token.bytes);
			if (token.origin === "given") return;
			this.lastAt = performance.now();
			this.firstAt ||= this.lastAt;
			this.numTimed++;
		});
	}

	// Seconds to the first token, and tokens per second after it.
	get speed() {
		const seconds = (this.lastAt - this.firstAt) / 1000;
		return { ttft: this.firstAt ? (this.firstAt - this.askedAt) / 1000 : null, rate: seconds > 0.02 ? (this.numTimed - 1) / seconds : null };
	}

	// Fetches the traces of tokens [first, first + count) once.
	async trace(first, count, numCandidates = 12) {
		const last = Math.min(first + count, this.tokens.length);
		const isThere = (index) => this.traces.get(index)?.numCandidates >= numCandidates;
		while (first < last && isThere(first)) first++;
		if (first >= last) return;
		const body = { ...this.sharedBody(), answer_token_ids: this.ids, position: first, num_tokens: last - first };
		const found = await post("/v1/trace", { ...body, num_candidates: numCandidates });
		found.tokens.forEach((trace, index) => this.traces.set(first + index, Object.assign(trace, { numCandidates })));
		this.promptBytes = found.prompt_bytes;
	}

	toJSON() {
		const { route, body, content, reasoning, calls, finish, fingerprint, branchedAt, promptIds, numCached } = this;
		const tokens = this.tokens.map(({ id, bytes, origin }) => [id, bytes, origin]);
		return { route, body, content, reasoning, calls, finish, fingerprint, branchedAt, promptIds, numCached, tokens };
	}

	static from(saved) {
		const answer = new Answer(saved.route, saved.body);
		const { tokens, ...rest } = saved;
		Object.assign(answer, rest, { state: "done" });
		for (const [id, bytes, origin] of tokens) {
			answer.tokens.push({ id, bytes, origin, logprob: null, top: null });
			answer.tokenText.push(bytes);
		}
		return answer;
	}
}

// Returns the log-probabilities of a chunk, in either of OpenAI's formats.
function scoresOf(logprobs) {
	if (!logprobs) return [];
	if (logprobs.content) {
		return logprobs.content.map(({ logprob, top_logprobs }) => ({ logprob, top: top_logprobs.map(({ token, logprob }) => [token, logprob]) }));
	}
	return logprobs.token_logprobs.map((logprob, index) => ({ logprob, top: Object.entries(logprobs.top_logprobs?.[index] ?? {}) }));
}
