// Indented JSON, and an editor that shows each error at its place.

import { h, on } from "./dom.js";

// Indents JSON, complete or not. `text(start, end)` makes the nodes of a piece.
export function prettyJson(source, text) {
	const nodes = [];
	let depth = 0;
	let before = "";
	for (const { 0: piece, index } of source.matchAll(/"(?:[^"\\]|\\.)*"?|[{}[\],:]|[^\s"{}[\],:]+/gs)) {
		const isOpened = before === "{" || before === "[";
		const isClosing = piece === "}" || piece === "]";
		if (isClosing) depth--;
		if (before === "," || isOpened !== isClosing) nodes.push(before && `\n${"  ".repeat(depth)}`);
		else if (before === ":") nodes.push(" ");
		nodes.push(text(index, index + piece.length));
		if (piece === "{" || piece === "[") depth++;
		before = piece;
	}
	return nodes;
}

export class JsonFault extends Error {
	constructor(message, start, end = start + 1) {
		super(message);
		Object.assign(this, { start, end });
	}
}

// Returns the value and the position of each part by JSON pointer. Throws a JsonFault.
export function readJson(text) {
	const places = new Map();
	let i = 0;
	const fail = (message, at = i) => {
		throw new JsonFault(message, Math.min(at, Math.max(text.length - 1, 0)));
	};
	const skip = () => {
		while (/\s/.test(text[i] ?? "x")) i++;
	};
	const expect = (sign, where) => {
		skip();
		if (text[i] !== sign) fail(i >= text.length ? `${sign} is missing at the end` : `${sign} is expected ${where}`);
		i++;
	};
	const scalar = () => {
		const match = /^("(?:[^"\\\n]|\\.)*"|-?\d[\d.eE+-]*|true|false|null)/.exec(text.slice(i));
		if (!match) fail(i >= text.length ? "a value is missing at the end" : text[i] === '"' ? "this text is never closed" : "this is not a JSON value");
		try {
			const value = JSON.parse(match[0]);
			i += match[0].length;
			return value;
		} catch {
			return fail("this is not a JSON value");
		}
	};
	const value = (pointer) => {
		skip();
		const start = i;
		let found;
		if (text[i] === "{") found = members(pointer);
		else if (text[i] === "[") found = items(pointer);
		else found = scalar();
		places.set(pointer, [start, i]);
		return found;
	};
	const list = (close, name, read) => {
		for (i++, skip(); text[i] !== close; skip()) {
			read();
			skip();
			if (text[i] === close) break;
			expect(",", `between two ${name}`);
			skip();
			if (text[i] === close) fail(`no comma is allowed before ${close}`);
		}
		i++;
	};
	const members = (pointer) => {
		const found = {};
		list("}", "members", () => {
			if (text[i] !== '"') fail(i >= text.length ? "} is missing at the end" : 'a name in "…" is expected');
			const start = i;
			const name = scalar();
			if (Object.hasOwn(found, name)) fail(`${JSON.stringify(name)} appears twice`, start);
			expect(":", "after a name");
			const inner = `${pointer}/${name.replace(/~/g, "~0").replace(/\//g, "~1")}`;
			Object.defineProperty(found, name, { value: value(inner), enumerable: true, configurable: true, writable: true });
			places.set(`${inner}#`, [start, i]);
		});
		return found;
	};
	const items = (pointer) => {
		const found = [];
		list("]", "items", () => found.push(value(`${pointer}/${found.length}`)));
		return found;
	};
	const found = value("");
	skip();
	if (i < text.length) fail("nothing may follow the value");
	return { value: found, places };
}

// Returns the place of a message like "… at /properties/a: 'type' must be …".
function placeOf(places, message) {
	const [, path, word] = / at (\/[^\s:]*):(?: '([^']+)')?/.exec(message) ?? [];
	if (path === undefined) return places.get("");
	const pointer = path === "/" ? "" : path;
	return places.get(`${pointer}/${word}#`) ?? places.get(`${pointer}#`) ?? places.get(pointer) ?? places.get("");
}

let count = 0;

export class JsonEditor {
	constructor(label, { rows = 8, placeholder = "", oninput = () => {} } = {}) {
		const id = `json-${count++}`;
		this.backdrop = h("pre.backdrop", { "aria-hidden": "true" });
		this.area = h("textarea", { id, rows, placeholder, spellcheck: "false", autocomplete: "off", "aria-describedby": `${id}-fault` });
		this.fault = h("p.fault", { id: `${id}-fault`, hidden: true });
		this.element = h("div.json", h("label", { for: id }, label), h("div.layers", this.backdrop, this.area), this.fault);
		on(this.area, "input", () => {
			this.check();
			oninput(this.area.value);
		});
		on(this.area, "scroll", () => {
			this.backdrop.scrollTop = this.area.scrollTop;
			this.backdrop.scrollLeft = this.area.scrollLeft;
		});
		on(this.area, "keydown", (event) => {
			if (event.key !== "Tab" || event.shiftKey || event.altKey || event.ctrlKey || !this.area.value) return;
			if (this.area.selectionStart === this.area.value.length) return; // Tab leaves from the end
			event.preventDefault();
			document.execCommand("insertText", false, "  ");
		});
	}

	get text() {
		return this.area.value;
	}

	set text(value) {
		this.area.value = value;
		this.check();
	}

	// The value, or undefined. Shows and throws a JsonFault.
	get value() {
		if (!this.text.trim()) return undefined;
		try {
			return readJson(this.text).value;
		} catch (fault) {
			this.show(fault.message, fault.start, fault.end);
			throw fault;
		}
	}

	check() {
		this.show("");
		try {
			void this.value;
		} catch {
			return; // it is shown
		}
	}

	// Shows an error of the server.
	showMessage(message) {
		const [start, end] = placeOf(readJson(this.text).places, message) ?? [0, 1];
		this.show(message, start, end);
	}

	show(message, start = 0, end = 0) {
		const { text } = this;
		this.fault.hidden = !message;
		this.area.setAttribute("aria-invalid", String(Boolean(message)));
		if (!message) return this.backdrop.replaceChildren();
		const before = text.slice(0, start).split("\n");
		this.fault.textContent = `Line ${before.length}, column ${before.at(-1).length + 1}: ${message}`;
		this.backdrop.replaceChildren(text.slice(0, start), h("mark", text.slice(start, Math.max(end, start + 1)) || " "), text.slice(end), "\n");
		this.backdrop.scrollTop = this.area.scrollTop;
	}
}
