// The tokens of the prompt, with those from the cache marked.

import { isExpected } from "./api.js";
import { $, button, h } from "./dom.js";
import { TokenText } from "./tokens.js";

const MOST = 4000; // tokens that are shown

export function showPrompt(answer) {
	const panel = $("prompt");
	if (!answer?.tokens.length || answer.isRunning) {
		return panel.replaceChildren(h("p.faint", "When an answer has ended, its prompt appears here, token by token."));
	}
	if (answer.promptBytes) return draw(answer);
	panel.replaceChildren(button("Show the prompt's tokens", () => load(answer), { class: "primary" }), summary(answer));
}

async function load(answer) {
	try {
		await answer.trace(0, 1);
		if (!answer.promptBytes) {
			answer.traces.delete(0);
			await answer.trace(0, 1);
		}
		draw(answer);
	} catch (error) {
		if (!isExpected(error)) throw error;
		$("prompt").append(h("p.fault", error.message));
	}
}

const summary = ({ numPrompt, numCached }) =>
	h("p.facts", numPrompt === null ? "" : `${numPrompt} tokens, ${numCached} reused from the cache`);

function draw(answer) {
	const text = new TokenText();
	const bytes = answer.promptBytes.slice(0, MOST);
	bytes.forEach((each) => text.push(each));
	const spans = bytes.map((_, index) =>
		h("span", { class: index < answer.numCached ? "t cached" : "t computed", title: `${answer.promptIds?.[index] ?? ""}` }, text.of(index) === "" ? "␀" : text.of(index)));
	$("prompt").replaceChildren(summary(answer),
		h("p", h("span.key.cached", "reused from the cache"), h("span.key.computed", "computed")),
		h("div.tokens.raw", spans), bytes.length < answer.promptBytes.length ? h("p.faint", `Only the first ${MOST} tokens are shown.`) : "");
}
