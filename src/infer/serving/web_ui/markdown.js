// Markdown as DOM nodes. `text(start, end)` makes the nodes of a piece. The source is never parsed as HTML.

import { h, plainButton } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const SAFE = /^(https?:|mailto:)/i;
const DEEPEST = 12; // nested quotes and lists
const FAR = 2000; // characters between two marks

// Returns the blocks of source[from:]. Text that grows only changes the last block.
export function markdownBlocks(source, from, text) {
	const blocks = [];
	for (const [start, node] of blocksOf(source, linesOf(source, from, source.length), text)) blocks.push({ start, node });
	return blocks;
}

function linesOf(source, start, end) {
	const lines = [];
	while (start <= end) {
		const stop = source.indexOf("\n", start);
		const last = stop < 0 || stop > end ? end : stop;
		lines.push({ start, end: last });
		start = last + 1;
	}
	return lines;
}

function* blocksOf(source, lines, text, depth = 0) {
	const at = (line) => source.slice(line.start, line.end);
	for (let i = 0; i < lines.length; ) {
		const first = i;
		const line = at(lines[i]);
		let match;
		if (line.trim() === "") {
			i++;
			continue;
		}
		if ((match = FENCE.exec(line))) {
			const close = new RegExp(`^ {0,3}${match[1][0]}{${match[1].length},}\\s*$`);
			for (i++; i < lines.length && !close.test(at(lines[i])); i++);
			yield [lines[first].start, codeBlock(match[2].trim(), lines.slice(first + 1, i), text, i === lines.length)];
			i++;
		} else if ((match = HEADING.exec(line))) {
			const level = Math.min(match[1].length + 2, 6);
			yield [lines[i].start, h(`h${level}`, {}, inline(source, lines[i].start + match[0].length, lines[i].end, text))];
			i++;
		} else if (RULE.test(line)) {
			yield [lines[i].start, h("hr")];
			i++;
		} else if (QUOTE.test(line) && depth < DEEPEST) {
			const inner = [];
			for (; i < lines.length && QUOTE.test(at(lines[i])); i++) {
				inner.push({ start: lines[i].start + QUOTE.exec(at(lines[i]))[0].length, end: lines[i].end });
			}
			yield [lines[first].start, h("blockquote", nodesOf(source, inner, text, depth + 1))];
		} else if (ITEM.test(line) && depth < DEEPEST) {
			const [node, next] = list(source, lines, i, text, depth);
			yield [lines[first].start, node];
			i = next;
		} else if (line.includes("|") && i + 1 < lines.length && at(lines[i + 1]).includes("-") && DIVIDER.test(at(lines[i + 1]))) {
			for (i += 2; i < lines.length && at(lines[i]).includes("|"); i++);
			yield [lines[first].start, table(source, lines.slice(first, i), text)];
		} else {
			for (i++; i < lines.length && !begins(at(lines[i])); i++);
			yield [lines[first].start, h("p", paragraph(source, lines.slice(first, i), text))];
		}
	}
}

const begins = (line) =>
	line.trim() === "" || FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line) || RULE.test(line);
const nodesOf = (source, lines, text, depth) => Array.from(blocksOf(source, lines, text, depth), ([, node]) => node);

function paragraph(source, lines, text) {
	return lines.flatMap((line, index) => [
		...(index ? [text(lines[index - 1].end, lines[index - 1].end + 1)] : []),
		...inline(source, line.start, line.end, text),
	]);
}

function codeBlock(language, lines, text, isOpen) {
	const code = h("code", { data: { language: language.toLowerCase().split(/[^\w+#-]/)[0] } }, lines.length ? text(lines[0].start, lines[lines.length - 1].end) : "");
	const copy = plainButton("Copy", () => navigator.clipboard?.writeText(code.textContent));
	return h("div", { class: isOpen ? "code open" : "code" }, h("div.code-head", h("span", language || "text"), copy),
		h("pre", { tabIndex: 0, role: "region", "aria-label": "Code" }, code));
}

// An empty line ends a list, so that the last block stays short.
function list(source, lines, i, text, depth) {
	const at = (line) => source.slice(line.start, line.end);
	const isOrdered = (match) => /\d/.test(match[2]);
	const first = ITEM.exec(at(lines[i]));
	const items = [];
	while (i < lines.length) {
		const match = ITEM.exec(at(lines[i]));
		if (!match || isOrdered(match) !== isOrdered(first)) break;
		const width = match[0].length;
		const inner = [{ start: lines[i].start + width, end: lines[i].end }];
		for (i++; i < lines.length; i++) {
			const line = at(lines[i]);
			const indent = line.length - line.trimStart().length;
			const isBlank = line.trim() === "";
			if (isBlank && !(i + 1 < lines.length && /^ {2,}\S/.test(at(lines[i + 1])))) break;
			if (!isBlank && indent < 2) break;
			inner.push({ start: Math.min(lines[i].start + Math.min(indent, width), lines[i].end), end: lines[i].end });
		}
		const nodes = nodesOf(source, inner, text, depth + 1);
		items.push(h("li", nodes[0]?.tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes));
	}
	const start = isOrdered(first) ? { start: parseInt(first[2], 10) } : {};
	return [h(isOrdered(first) ? "ol" : "ul", start, items), i];
}

function table(source, lines, text) {
	const row = (line, tag) => {
		const cells = [];
		let start = line.start;
		let end = line.end;
		while (start < end && /[\s|]/.test(source[start]) && source[start] !== "\n") if (source[start++] === "|") break;
		while (end > start && /\s/.test(source[end - 1])) end--;
		if (source[end - 1] === "|") end--;
		for (let i = start; i <= end; i++) {
			if (i < end && (source[i] !== "|" || source[i - 1] === "\\")) continue;
			cells.push(h(tag, {}, inline(source, start, i, text)));
			start = i + 1;
		}
		return h("tr", cells);
	};
	const [head, , ...body] = lines;
	return h("div.table", { tabIndex: 0, role: "region", "aria-label": "Table" },
		h("table", h("thead", row(head, "th")), h("tbody", body.map((line) => row(line, "td")))));
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const isWord = (character) => character !== undefined && /[\p{L}\p{N}]/u.test(character);

function inline(source, start, end, text) {
	const nodes = [];
	let plain = start;
	const flush = (until) => until > plain && nodes.push(text(plain, until));
	for (let i = start; i < end; ) {
		const found = code(source, i, end, text) ?? link(source, i, end, text) ?? mark(source, i, end, start, text);
		if (source[i] === "\\" && i + 1 < end && /[!-/:-@[-`{-~]/.test(source[i + 1])) {
			flush(i);
			plain = i + 1;
			i += 2;
		} else if (found) {
			flush(i);
			nodes.push(found.node);
			i = plain = found.end;
		} else i++;
	}
	flush(end);
	return nodes;
}

function code(source, i, end, text) {
	if (source[i] !== "`") return null;
	const ticks = /^`+/.exec(source.slice(i, end))[0];
	const close = source.indexOf(ticks, i + ticks.length);
	if (close < 0 || close + ticks.length > end) return null;
	return { node: h("code", text(i + ticks.length, close)), end: close + ticks.length };
}

function link(source, i, end, text) {
	if (source[i] !== "[") return null;
	const match = /^\[([^\[\]\n]*)\]\(([^()\s]+)\)/.exec(source.slice(i, Math.min(end, i + 2000)));
	if (!match || !SAFE.test(match[2])) return null;
	const inner = inline(source, i + 1, i + 1 + match[1].length, text);
	return { node: h("a", { href: match[2], target: "_blank", rel: "noopener noreferrer" }, inner), end: i + match[0].length };
}

function mark(source, i, end, start, text) {
	for (const [sign, tag] of MARKS) {
		if (!source.startsWith(sign, i)) continue;
		const inside = i + sign.length;
		if (inside >= end || /\s/.test(source[inside]) || (sign[0] === "_" && i > start && isWord(source[i - 1]))) continue;
		const near = source.slice(0, Math.min(end, i + FAR));
		let close = near.indexOf(sign, inside + 1);
		while (sign.length === 1 && close >= 0 && near[close + 1] === sign) close = near.indexOf(sign, close + 2);
		if (close < 0 || /\s/.test(source[close - 1])) continue;
		if (sign[0] === "_" && isWord(source[close + sign.length])) continue;
		return { node: h(tag, {}, inline(source, inside, close, text)), end: close + sign.length };
	}
	return null;
}
