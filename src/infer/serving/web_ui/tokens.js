// The tokens of an answer as spans, in its Markdown or as written.

import { h, on } from "./dom.js";
import { colour } from "./highlight.js";
import { markdownBlocks } from "./markdown.js";

// Decodes tokens. A character that spans several tokens belongs to the first.
export class TokenText {
	constructor() {
		this.text = "";
		this.starts = [];
		this.decoder = new TextDecoder();
	}

	push(bytes) {
		this.starts.push(this.text.length);
		this.text += this.decoder.decode(Uint8Array.from(bytes), { stream: true });
	}

	of(index) {
		return this.text.slice(this.starts[index], this.starts[index + 1] ?? this.text.length);
	}

	// Returns the token at a character.
	at(offset) {
		let [low, high] = [0, this.starts.length - 1];
		while (low < high) {
			const middle = (low + high + 1) >> 1;
			if (this.starts[middle] <= offset) low = middle;
			else high = middle - 1;
		}
		return low;
	}
}

// Keeps `element` up to date. Finished parts stay unchanged.
export class TokenView {
	constructor(answer, isRaw) {
		this.answer = answer;
		this.isRaw = isRaw;
		this.element = h("div", { class: isRaw ? "tokens raw" : "tokens prose" });
		this.clear();
	}

	update() {
		if (this.isRaw) this.updateRaw();
		else this.updateProse();
	}

	updateRaw() {
		const { tokens, tokenText } = this.answer;
		if (tokens.length < this.num) this.clear();
		if (this.num) this.element.lastChild.textContent = shownRaw(tokenText.of(this.num - 1));
		for (; this.num < tokens.length; this.num++) this.element.append(spanOf(this.answer, this.num, shownRaw(tokenText.of(this.num))));
	}

	updateProse() {
		if (this.answer.content !== this.before) this.growProse();
		const last = this.blocks.at(-1);
		if (!last) return;
		for (; this.numColoured < this.blocks.length - 1; this.numColoured++) colourAll(this.blocks[this.numColoured].node);
		if (!this.answer.isRunning) colourAll(last.node);
	}

	growProse() {
		const { content, tokenText } = this.answer;
		if (!content.startsWith(this.before)) this.clear();
		const base = tokenText.text.startsWith(content) ? 0 : tokenText.text.indexOf(content);
		const text = (start, end) => tokenNodes(this.answer, base, content, start, end);
		const code = this.openCode(content);
		if (code) goOn(code, this.before.length, content.length, text);
		else {
			const last = this.blocks.pop();
			last?.node.remove();
			for (const block of markdownBlocks(content, last?.start ?? 0, text)) {
				this.blocks.push(block);
				this.element.append(block.node);
			}
		}
		this.before = content;
	}

	// Returns the open code block if the new text can only continue it.
	openCode(content) {
		const last = this.blocks.at(-1);
		if (!last?.node.matches(".code.open")) return null;
		const line = content.lastIndexOf("\n", this.before.length - 1) + 1;
		return line > last.start && !/^ {0,3}[`~]/m.test(content.slice(line)) ? last.node.querySelector("code") : null;
	}

	clear() {
		this.element.replaceChildren();
		Object.assign(this, { blocks: [], num: 0, numColoured: 0, before: "" });
	}

	// Updates the marks.
	remark() {
		for (const span of this.element.closest(".answer").querySelectorAll("[data-i]")) {
			const name = classOf(this.answer, Number(span.dataset.i));
			if (span.className !== name) span.className = name;
		}
	}
}

// Colours the code of a finished block.
function colourAll(block) {
	if (block.dataset.coloured) return;
	block.dataset.coloured = "";
	block.classList.remove("open");
	block.querySelectorAll("pre > code").forEach(colour);
}

// A growing part of the answer's text as tokens.
export class PartView {
	constructor(answer, element) {
		Object.assign(this, { answer, element, before: "" });
	}

	update(part) {
		if (part === this.before) return;
		if (!part.startsWith(this.before)) this.element.replaceChildren();
		const base = this.answer.tokenText.text.indexOf(part);
		const from = this.element.firstChild ? this.before.length : 0;
		goOn(this.element, from, part.length, (start, end) => tokenNodes(this.answer, base, part, start, end));
		this.before = part;
	}
}

// Extends an element's text from `from` to `until`. Its last token may have grown.
function goOn(element, from, until, text) {
	const last = element.lastChild;
	const start = from - (last?.textContent.length ?? 0);
	last?.remove();
	element.append(text(start, until));
}

// Returns part[start:end] as token spans. `base` is the part's offset in the answer's text.
export function tokenNodes(answer, base, part, start, end) {
	const fragment = document.createDocumentFragment();
	if (base < 0) fragment.append(part.slice(start, end));
	if (base < 0 || start >= end) return fragment;
	const { text, starts } = answer.tokenText;
	for (let index = answer.tokenText.at(base + start); starts[index] < base + end; index++) {
		const piece = text.slice(Math.max(base + start, starts[index]), Math.min(base + end, starts[index + 1] ?? text.length));
		if (piece) fragment.append(spanOf(answer, index, piece));
	}
	return fragment;
}

function spanOf(answer, index, text) {
	const span = document.createElement("span");
	span.className = classOf(answer, index);
	span.dataset.i = index;
	span.textContent = text;
	return span;
}

function classOf({ tokens, differsAt, branchedAt, otherwise }, index) {
	const { origin, logprob } = tokens[index];
	const names = ["t", origin];
	if (logprob !== null) names.push(`p${Math.min(9, Math.floor(10 * Math.exp(logprob)))}`);
	if (index === differsAt) names.push("differs");
	if (index === branchedAt?.position) names.push("branched");
	if (otherwise?.has(index)) names.push(otherwise.get(index));
	return names.join(" ");
}

const shownRaw = (text) => (text === "" ? "␀" : text.replace(/\n/g, "↵\n"));

const VIEWS = ".tokens, .part";

// Handles keys and pointer on tokens. Calls `choose(answer, index, isPinned)`.
export function listenToTokens(root, answerOf, choose) {
	const of = (event) => {
		const span = event.target.closest?.("[data-i]");
		return span ? [answerOf(span), Number(span.dataset.i), span] : null;
	};
	on(root, "pointerover", (event) => {
		const found = event.pointerType === "touch" ? null : of(event);
		if (found) choose(found[0], found[1], false);
	});
	on(root, "click", (event) => {
		const found = of(event);
		if (!found || String(getSelection()) !== "") return;
		focusToken(found[2]);
		choose(found[0], found[1], true);
	});
	on(root, "keydown", (event) => {
		const view = event.target.closest?.(VIEWS);
		if (!view || event.altKey || event.ctrlKey || event.metaKey) return;
		const spans = Array.from(view.querySelectorAll("[data-i]"));
		const here = spans.indexOf(event.target);
		const to = { ArrowRight: here + 1, ArrowLeft: Math.max(here - 1, 0), Home: 0, End: spans.length - 1 }[event.key];
		const isChosen = event.key === "Enter" && here >= 0;
		if (to === undefined && !isChosen) return;
		event.preventDefault();
		const span = spans[Math.min(isChosen ? here : to, spans.length - 1)];
		if (!span) return;
		focusToken(span);
		choose(answerOf(span), Number(span.dataset.i), isChosen);
	});
}

function focusToken(span) {
	for (const other of span.closest(VIEWS).querySelectorAll("[tabindex]:not(pre,.table)")) other.removeAttribute("tabindex");
	span.tabIndex = 0;
	span.focus();
}
