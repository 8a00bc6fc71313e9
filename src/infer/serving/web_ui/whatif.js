// The same logits sampled with other settings. If the known candidates cannot decide, the server is asked.

import { connection, isExpected, post } from "./api.js";
import { $, button, h, on, perFrame, plainButton, shown } from "./dom.js";
import { chosenWith, FILTERS, settingsOf } from "./noise.js";
import { NUMBERS } from "./parameters.js";

const NUM_CANDIDATES = 40;
const AT_ONCE = 16; // tokens per request
const REST = 500; // milliseconds
const MOST = 256;
const SLIDERS = NUMBERS.filter(({ name }) => FILTERS.includes(name));

export class WhatIf {
	constructor({ remark, go, branch }) {
		Object.assign(this, { remark, go, branch, answer: null, values: null, exact: new Map(), timer: 0 });
		this.draw = perFrame(() => this.update());
	}

	show(answer) {
		if (this.answer === answer) return;
		this.clear();
		Object.assign(this, { answer, values: null, result: null });
		if (!answer?.tokens.length || answer.isRunning) {
			$("whatif").replaceChildren(h("p.faint", "When an answer has ended, try other settings here. The first token that would change is marked."));
			this.answer = null;
			return;
		}
		this.load(answer);
	}

	clear() {
		if (!this.answer?.otherwise) return;
		this.answer.otherwise = null;
		this.remark(this.answer);
	}

	async load(answer) {
		const status = h("p.facts", { role: "status" }, "Reading the candidates …");
		$("whatif").replaceChildren(status);
		const count = Math.min(answer.tokens.length, MOST);
		try {
			for (let first = 0; first < count; first += AT_ONCE) {
				await answer.trace(first, Math.min(AT_ONCE, count - first), NUM_CANDIDATES);
				if (this.answer !== answer) return;
				if (first === 0) this.form(answer);
				this.draw();
			}
		} catch (error) {
			if (!isExpected(error)) throw error;
			$("whatif").append(h("p.fault", error.message));
		}
	}

	form(answer) {
		const own = settingsOf(answer.traces.get(0));
		this.values = { ...own, seed: own.seed ?? answer.body.seed };
		this.exact = new Map();
		const fields = SLIDERS.map(({ name, label, min, max, step }) => {
			const output = h("output", String(+this.values[name].toFixed(3)));
			const input = h("input", { type: "range", id: `what-${name}`, min: String(min), max: String(max), step: String(step) });
			input.value = this.values[name];
			on(input, "input", () => {
				this.values[name] = Number(input.value);
				output.textContent = input.value;
				this.change();
			});
			return h("div.field.number", h("label", { for: `what-${name}` }, label), input, output);
		});
		const seed = h("input", { type: "number", id: "what-seed" });
		seed.value = this.values.seed;
		on(seed, "input", () => {
			this.values.seed = Math.trunc(Number(seed.value)) || 0;
			this.change();
		});
		this.result = h("div", { role: "status", class: "result" });
		$("whatif").replaceChildren(h("p.faint", "The same logits with other settings:"), ...fields,
			h("div.field", h("label", { for: "what-seed" }, "Seed"), seed),
			plainButton("Reset", () => this.form(answer)), this.result);
		this.draw();
	}

	change() {
		this.exact = new Map();
		this.draw();
	}

	// Asks the server for its choices with these settings from token `first` on.
	ask(answer, first) {
		clearTimeout(this.timer);
		const { exact, values } = this;
		this.timer = setTimeout(async () => {
			const body = { ...answer.sharedBody(), ...values, answer_token_ids: answer.ids, position: first, num_candidates: 1 };
			try {
				const { tokens } = await post("/v1/trace", { ...body, num_tokens: Math.min(answer.tokens.length, MOST) - first });
				tokens.forEach((each, index) => exact.set(first + index, each.candidates.find(({ token_id }) => token_id === each.token_id)));
			} catch (error) {
				if (!isExpected(error)) throw error;
				exact.set(-1, error.message);
			}
			if (this.exact === exact) this.draw();
		}, REST);
	}

	update() {
		const { answer, values } = this;
		if (!answer || !values || !this.result) return;
		const found = { differs: [], unknown: [], num: 0 };
		answer.otherwise = new Map();
		for (let index = 0; index < Math.min(answer.tokens.length, MOST); index++) {
			const trace = answer.traces.get(index);
			if (!trace?.stages) break;
			found.num++;
			if (answer.tokens[index].origin === "given") continue;
			const chosen = this.exact.get(index) ?? chosenWith(trace, values, connection.model.vocab_size);
			if (chosen === null) {
				found.unknown.push(index);
				if (!found.differs.length) answer.otherwise.set(index, "untold");
			} else if (chosen.token_id !== answer.tokens[index].id) {
				answer.otherwise.set(index, found.differs.length ? "later" : "first-other");
				found.differs.push({ index, chosen });
			}
		}
		this.remark(answer);
		this.result.replaceChildren(...this.lines(answer, found));
		const isRead = found.num === Math.min(answer.tokens.length, MOST);
		if (found.unknown.length && isRead && !this.exact.size) this.ask(answer, found.unknown[0]);
	}

	lines(answer, { differs, unknown, num }) {
		const [first] = differs;
		if (unknown.length && unknown[0] < (first?.index ?? Infinity)) {
			const why = this.exact.get(-1) ?? "asking the server …";
			return [h("p", `From token ${unknown[0] + 1} on, ${NUM_CANDIDATES} candidates do not show what would be chosen: ${why}`)];
		}
		const lines = [h("p", first ? `Token ${first.index + 1} would have been different: ` : `All ${num} tokens would be the same.`,
			first && h("b", shown(answer.tokenText.of(first.index))), first && " → ", first && h("b.other", shown(first.chosen.text)))];
		if (first) {
			lines.push(h("div.row", button("Show it", () => this.go(answer, first.index)),
				button("Branch there", () => this.branch(answer, first.index, { id: first.chosen.token_id }), { class: "primary" })));
			if (differs.length > 1) lines.push(h("p.faint", `${differs.length - 1} later tokens would differ too if the text before them stayed the same.`));
		}
		if (answer.tokens.length > MOST) lines.push(h("p.faint", `Only the first ${MOST} tokens are compared.`));
		return lines;
	}
}
