// Colours code: a small tokenizer for common languages. It only splits text nodes into spans.

import { h } from "./dom.js";

const LONGEST = 50_000; // characters; longer code stays plain
const SLICE = 1000; // tokens
const [DOUBLE, SINGLE] = [String.raw`"(?:[^"\\\n]|\\.)*"?`, String.raw`'(?:[^'\\\n]|\\.)*'?`];
const TEMPLATE = "`(?:[^`\\\\]|\\\\[^])*`?";
const TRIPLE = `"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)`;
const BLOCK = String.raw`/\*[^]*?(?:\*/|$)`;
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\w*`;
const WORD = String.raw`[A-Za-z_$][\w$]*`;

const C_WORDS = `async await bool break case catch class const continue def default delete do else enum export extends
false final for fn from func function go if impl implements import in int interface let match mut namespace new nil null
package private protected pub public return self static string struct super switch this throw true try type typeof undefined using
var void while yield`;
const HASH_WORDS = `and as async await break case class continue def del do elif else end except False finally for from
function global if import in is lambda module nil None not or pass raise require rescue return then True true false null
try use while with yield`;
const SQL_WORDS = `and as asc by case create delete desc distinct drop else end exists from group having in index inner insert into is join
	key left like limit not null on or order primary select set table then union unique update values when where with`;

function rules(comments, strings, words, others = NUMBER, isFolded = false) {
	const keywords = new Set(words.split(/\s+/));
	const rule = new RegExp(`(?<comment>${comments})|(?<string>${strings})|(?<number>${others})|(?<word>${WORD})`, "g");
	return { rule, isKeyword: (word) => keywords.has(isFolded ? word.toLowerCase() : word) };
}

const SLASH = rules(`//.*|${BLOCK}`, `${DOUBLE}|${SINGLE}|${TEMPLATE}`, C_WORDS);
const LANGUAGES = {
	"js javascript jsx ts tsx typescript json jsonc java kotlin kt c h cpp c++ cc cs csharp c# go golang swift php": SLASH,
	"rust rs": rules(`//.*|${BLOCK}`, String.raw`${DOUBLE}|'(?:[^'\\\n]|\\.)'`, C_WORDS),
	"py python python3 rb ruby sh bash shell console yaml yml toml ini r perl makefile dockerfile":
		rules(String.raw`(?<!\S)#.*`, `${TRIPLE}|${DOUBLE}|${SINGLE}`, HASH_WORDS),
	sql: rules(`--.*|${BLOCK}`, `${DOUBLE}|${SINGLE}`, SQL_WORDS, NUMBER, true),
	"css scss less": rules(BLOCK, `${DOUBLE}|${SINGLE}`, "", String.raw`#[\da-fA-F]{3,8}\b|\b\d[\w.%]*`),
	"html xml": rules("<!--[^]*?(?:-->|$)", `(?<==)(?:${DOUBLE}|${SINGLE})`, "", String.raw`(?<=</?)[A-Za-z][\w:-]*`),
};
const byName = new Map(Object.entries(LANGUAGES).flatMap(([names, found]) => names.split(" ").map((name) => [name, found])));

// Returns the coloured pieces of a text: [start, end, kind].
export function tokenize(text, { rule, isKeyword }) {
	const pieces = [];
	for (const match of text.matchAll(rule)) {
		const { comment, string, number } = match.groups;
		const kind = comment ? "comment" : string ? "string" : number ? "number" : isKeyword(match[0]) && "word";
		if (kind) pieces.push([match.index, match.index + match[0].length, kind]);
	}
	return pieces;
}

// Colours the code of an element that no longer grows, in slices so that the page stays responsive.
export async function colour(code) {
	const text = code.textContent;
	const language = byName.get(code.dataset.language);
	if (!language || text.length > LONGEST) return;
	const pieces = tokenize(text, language);
	const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
	const nodes = [];
	while (walker.nextNode()) nodes.push(walker.currentNode);
	let start = 0;
	let first = 0;
	for (const [index, node] of nodes.entries()) {
		if (index % SLICE === SLICE - 1) await new Promise((resolve) => setTimeout(resolve));
		const { data } = node;
		const parts = [];
		let from = 0;
		while (pieces[first]?.[1] <= start) first++;
		for (let i = first; pieces[i]?.[0] < start + data.length; i++) {
			const [left, right] = [Math.max(pieces[i][0] - start, 0), Math.min(pieces[i][1] - start, data.length)];
			parts.push(data.slice(from, left), h(`span.code-${pieces[i][2]}`, data.slice(left, right)));
			from = right;
		}
		if (parts.length) node.replaceWith(...parts, data.slice(from));
		start += data.length;
	}
}
