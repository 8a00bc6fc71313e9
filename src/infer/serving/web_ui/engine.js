// The engine live: slots, queue, cache pages and the time per step.

import { connection, LostError, ofModel, stream } from "./api.js";
import { $, grouped, h, perFrame, svg } from "./dom.js";

const COLUMNS = 72;
const SECONDS = 0.25;
const [CELL, ROW, HEIGHT] = [4.8, 13, 46];

export class Engine {
	constructor() {
		Object.assign(this, { columns: [], snapshot: null, before: null, abort: null, timer: 0 });
		this.draw = perFrame(() => this.update());
	}

	// Reads the events while the tab is shown.
	async start() {
		if (this.abort) return;
		this.abort = new AbortController();
		this.timer = setInterval(() => this.tick(), 1000 * SECONDS);
		const { signal } = this.abort;
		this.draw();
		while (!signal.aborted) {
			try {
				for await (const snapshot of stream(ofModel(`/v1/engine/events?interval=${SECONDS}`), null, signal)) this.snapshot = { ...snapshot, at: performance.now() };
			} catch (error) {
				if (error.name === "AbortError") return;
				if (!(error instanceof LostError)) console.warn(error);
			}
			await new Promise((resolve) => setTimeout(resolve, 1000));
		}
	}

	stop() {
		this.abort?.abort();
		this.abort = null;
		clearInterval(this.timer);
	}

	tick() {
		const { snapshot, before } = this;
		if (!snapshot) return;
		this.columns.push(columnOf(snapshot, before));
		if (this.columns.length > COLUMNS) this.columns.shift();
		this.before = snapshot;
		this.draw();
	}

	update() {
		const { snapshot, columns } = this;
		if (!snapshot) return void $("engine").replaceChildren(h("p.faint", "Waiting for the engine …"), facts());
		const running = snapshot.sequences.filter((each) => each.slot !== null);
		const waiting = snapshot.sequences.length - running.length;
		const recent = columns.slice(-8);
		const seconds = recent.reduce((sum, each) => sum + each.seconds, 0);
		const sum = (name) => recent.reduce((total, each) => total + each[name], 0);
		const steps = sum("steps");
		$("engine").replaceChildren(
			h("dl.figures", figure("running", `${running.length} of ${snapshot.max_running}`), figure("waiting", waiting),
				figure("tokens/s", steps ? Math.round((sum("decoded") + sum("read")) / seconds) : 0), figure("steps/s", steps ? Math.round(steps / seconds) : 0),
				figure("ms per step", steps ? ((1000 * sum("busy")) / steps).toFixed(1) : "–"), figure("preempted", snapshot.num_preemptions)),
			slots(columns, snapshot.max_running), line(columns), pages(snapshot),
			h("p.facts", `${grouped(snapshot.num_steps)} steps · ${grouped(snapshot.reused_tokens)} prompt tokens reused from the cache`),
			queue(snapshot), facts());
	}
}

function columnOf(snapshot, before) {
	const isNew = before && snapshot.at !== before.at;
	const seconds = isNew ? (snapshot.at - before.at) / 1000 : SECONDS;
	const old = new Map((before?.sequences ?? []).map((each) => [each.number, each]));
	const cells = new Map();
	let [decoded, read] = [0, 0];
	for (const each of snapshot.sequences) {
		if (each.slot === null) continue;
		const last = old.get(each.number) ?? { num_tokens: each.num_prompt_tokens, num_computed: each.num_reused };
		const isReading = each.num_computed < each.num_prompt_tokens;
		const gave = isNew ? Math.max(0, each.num_tokens - last.num_tokens) : 0;
		const took = isNew ? Math.max(0, Math.min(each.num_computed, each.num_prompt_tokens) - last.num_computed) : 0;
		decoded += gave;
		read += took;
		cells.set(each.slot, isReading ? "reading" : gave || !before ? "decoding" : "idle");
	}
	const steps = isNew ? snapshot.num_steps - before.num_steps : 0;
	return { cells, decoded, read, steps, seconds, busy: steps ? seconds : 0, waiting: snapshot.sequences.filter((each) => each.slot === null).length };
}

const figure = (name, value) => h("div", h("dt", name), h("dd", String(value)));

function slots(columns, count) {
	const root = svg("svg", { viewBox: `0 0 ${COLUMNS * CELL} ${count * ROW}`, class: "slots", role: "img" },
		svg("title", `${count} slots over the last ${COLUMNS * SECONDS} seconds: blue reads a prompt, orange gives tokens`));
	for (let slot = 0; slot < count; slot++) {
		root.append(svg("rect.lane", { x: 0, y: slot * ROW + 1, width: COLUMNS * CELL, height: ROW - 3 }));
	}
	columns.forEach(({ cells }, i) => {
		const x = (COLUMNS - columns.length + i) * CELL;
		for (const [slot, name] of cells) if (slot < count) root.append(svg("rect", { x, y: slot * ROW + 1, width: CELL - 0.6, height: ROW - 3, class: name }));
	});
	return h("figure", h("figcaption", "Slots × time ", h("span.key.reading", "prompt"), h("span.key.decoding", "tokens")), root);
}

function line(columns) {
	const times = columns.map((each) => (each.steps ? (1000 * each.seconds) / each.steps : null));
	const most = Math.max(10, ...times);
	const root = svg("svg", { viewBox: `0 0 ${COLUMNS * CELL} ${HEIGHT}`, class: "times", role: "img" }, svg("title", `Milliseconds per step, at most ${most.toFixed(0)}`));
	times.forEach((time, i) => {
		if (time === null) return;
		const height = Math.max(1, ((HEIGHT - 4) * time) / most);
		root.append(svg("rect", { x: (COLUMNS - times.length + i) * CELL, y: HEIGHT - height, width: CELL - 0.6, height }));
	});
	columns.forEach(({ waiting }, i) => {
		if (waiting) root.append(svg("circle.queued", { cx: (COLUMNS - columns.length + i) * CELL + 2, cy: 3, r: 2 }));
	});
	return h("figure", h("figcaption", `Time per step, up to ${most.toFixed(0)} ms `, h("span.key.queued", "a request waits")), root);
}

function pages({ pools }) {
	return h("figure", h("figcaption", "Pages of the cache"), pools.map(({ num_pages, num_free }) => {
		const used = num_pages - num_free;
		return h("div.row", h("meter", { max: num_pages, value: used, "aria-label": "Pages in use" }), h("span.facts", `${grouped(used)} of ${grouped(num_pages)}`));
	}));
}

function queue({ sequences }) {
	if (!sequences.length) return h("p.faint", "No requests are running.");
	const row = (each) => h("tr", h("td", each.slot === null ? "waiting" : `slot ${each.slot}`), h("td", `${Math.min(each.num_computed, each.num_prompt_tokens)} of ${each.num_prompt_tokens}`),
		h("td", each.num_tokens - each.num_prompt_tokens), h("td", `${each.seconds.toFixed(1)} s`));
	return h("table.queue", h("caption.hidden", "Sequences"), h("thead", h("tr", ["slot", "prompt", "tokens", "time"].map((text) => h("th", { scope: "col" }, text)))),
		h("tbody", sequences.slice(0, 24).map(row)));
}

function facts() {
	const { model } = connection;
	if (!model) return "";
	const rows = [["model", model.model], ["", model.description.replace(/^LLM\((.*)\)$/, "$1")], ["context", `${grouped(model.max_model_len)} tokens`],
		["vocabulary", grouped(model.vocab_size)], ["layers", model.num_layers], ["keys and values", `${model.kv_type}, ${(model.cache_bytes / 2 ** 20).toFixed(0)} MiB when full`],
		["slots", model.total_slots], ["version", model.version], ["fingerprint", model.system_fingerprint]];
	return h("table.about", h("caption", "The model"), h("tbody", rows.map(([name, value]) => h("tr", h("th", { scope: "row" }, name), h("td", String(value))))));
}
