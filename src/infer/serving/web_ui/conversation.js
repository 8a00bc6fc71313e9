// The conversation: its messages, their actions, and the answers as they arrive.

import { Answer } from "./answer.js";
import { connection } from "./api.js";
import { $, announce, button, h, notify, on, perFrame, plainButton } from "./dom.js";
import { prettyJson } from "./json.js";
import { makeLink } from "./permalink.js";
import { makeBody, routeOf, setsOf, showFault } from "./settings.js";
import { Message, saveConversations, settings } from "./state.js";
import { listenToTokens, PartView, tokenNodes, TokenView } from "./tokens.js";

// True if the end is in view. Read on scroll only, because reading it computes the layout.
let isAtEnd = true;
on($("messages"), "scroll", ({ target }) => (isAtEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 60));

export class ConversationView {
	// `choose(answer, index, isPinned)` shows a token.
	constructor(conversation, { choose, changed, sendExample }) {
		Object.assign(this, { conversation, choose, changed, sendExample, panes: new Map(), messageOf: new Map() });
		this.element = h("div.conversation");
		listenToTokens(this.element, (span) => this.panes.get(span.closest(".answer").dataset.id).answer, choose);
		this.render();
	}

	render() {
		for (const pane of this.panes.values()) pane.close();
		this.panes.clear();
		const { path } = this.conversation;
		this.element.replaceChildren(...path.map((message) => this.article(message)));
		this.element.classList.toggle("paired", this.element.querySelector(".pair") !== null);
		if (!path.length) this.element.append(welcome(this.conversation.mode, this.sendExample));
		this.changed();
	}

	article(message) {
		const parent = this.conversation.parentOf(message);
		if (message.role === "assistant") {
			const pair = parent.pair?.includes(parent.active) ? parent.pair : [parent.active];
			const panes = pair.map((index) => this.pane(parent, parent.children[index], pair.length > 1));
			if (pair.length > 1) this.compare(panes);
			return h("div", { class: pair.length > 1 ? "pair" : "single" }, panes.map((pane) => pane.element));
		}
		const isTool = message.role === "tool";
		const name = isTool ? "Tool result" : this.conversation.mode === "text" ? "Text" : "You";
		return h("article", { class: `message ${message.role}`, "aria-label": name },
			h("header", h("h2", name), variants(parent, message, () => this.render()),
				h("span.actions", plainButton("Edit", (event) => this.edit(message, event.target.closest("article"))))),
			h("div.text", message.content));
	}

	pane(parent, message, isPaired) {
		const pane = new AnswerPane(message, this, variants(parent, message, () => this.render(), isPaired && (() => this.unpair(parent, message))));
		this.panes.set(message.answer.id, pane);
		return pane;
	}

	unpair(parent, message) {
		parent.pair = null;
		parent.active = parent.children.indexOf(message);
		this.render();
	}

	// Marks the first token that differs.
	compare([first, second]) {
		const mark = () => {
			const [a, b] = [first.answer.tokens, second.answer.tokens];
			let index = 0;
			while (index < a.length && index < b.length && a[index].id === b[index].id) index++;
			const differsAt = index < a.length && index < b.length ? index : null;
			for (const pane of [first, second]) {
				if (pane.answer.differsAt === differsAt) continue;
				pane.answer.differsAt = differsAt;
				pane.view.remark();
			}
		};
		first.afterUpdate = second.afterUpdate = mark;
		mark();
	}

	send(text) {
		const parent = this.conversation.last;
		const last = this.conversation.mode === "text" ? this.conversation.root : parent;
		this.ask(last.add(new Message("user", { content: text })));
	}

	// Sends the results of tool calls, one message per call.
	answerTools(parent, calls, results) {
		this.ask(calls.reduce((last, call, index) => last.add(new Message("tool", { content: results[index], callId: call.id })), parent));
	}

	// Answers a message with the conversation's settings, or with both sets if two are compared.
	ask(parent) {
		const made = [];
		for (const [name, values] of setsOf(this.conversation)) {
			try {
				made.push(new Answer(routeOf(this.conversation), makeBody(values, this.conversation, parent)));
			} catch (error) {
				showFault(error, name);
				return this.render();
			}
		}
		const indices = made.map((answer) => parent.children.indexOf(parent.add(new Message("assistant", { answer }))));
		parent.pair = indices.length > 1 ? indices : null;
		if (parent.pair) parent.active = indices[0];
		this.conversation.changedAt = Date.now();
		this.render();
		for (const answer of made) this.follow(answer, answer.run());
	}

	regenerate(message) {
		this.ask(this.conversation.parentOf(message));
	}

	branch(answer, position, token) {
		const message = this.panes.get(answer.id)?.message;
		if (!message) return;
		const parent = this.conversation.parentOf(message);
		const before = parent.children.indexOf(message);
		const other = Answer.branch(answer, position, token);
		parent.add(new Message("assistant", { answer: other }));
		parent.pair = [before, parent.active];
		this.render();
		this.follow(other, other.running);
	}

	resume(answer) {
		this.follow(answer, answer.resume());
	}

	async follow(answer, running) {
		this.changed();
		await running;
		saveConversations();
		this.changed();
		const { length } = answer.tokens;
		if (answer.state === "done") announce(`The answer has ended after ${length} tokens`);
		if (answer.state === "stopped") announce(`The answer was stopped after ${length} tokens`);
		if (answer.state === "failed") showFault(answer.error);
	}

	edit(message, article) {
		const area = h("textarea", { rows: Math.min(20, message.content.split("\n").length + 1), "aria-label": "Edit the message" });
		area.value = message.content;
		const done = () => {
			const parent = this.conversation.parentOf(message);
			const values = { content: area.value, callId: message.callId };
			this.ask(parent.add(new Message(message.role, values)));
		};
		on(area, "keydown", (event) => {
			if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done();
			if (event.key === "Escape") this.render();
		});
		article.querySelector(".text").replaceWith(h("div.edit", area,
			h("div.actions", button("Send", done, { class: "primary" }), button("Cancel", () => this.render()))));
		area.focus();
	}

	editLast() {
		const message = this.conversation.path.findLast((each) => each.role === "user");
		const index = this.conversation.path.indexOf(message);
		if (message) this.edit(message, this.element.children[index]);
	}

	// The answers that are shown.
	get answers() {
		return Array.from(this.panes.values(), (pane) => pane.answer);
	}

	// Updates the marks of an answer.
	remark(answer) {
		this.panes.get(answer.id)?.view.remark();
	}
}

class AnswerPane {
	constructor(message, owner, chooser) {
		const name = String(message.answer.body.model ?? connection.model?.model ?? "Answer");
		Object.assign(this, { message, owner, answer: message.answer, afterUpdate: () => {} });
		this.view = new TokenView(this.answer, settings.view.isRaw);
		this.reasoning = h("details.folded", { hidden: true }, h("summary"), h("div.text.part"));
		this.thought = new PartView(this.answer, this.reasoning.lastChild);
		this.calls = h("div.calls");
		this.foot = h("p.facts");
		this.fault = h("p.fault", { hidden: true });
		this.actions = h("span.actions");
		this.element = h("article.message.answer", { "aria-label": `Answer of ${name}`, data: { id: this.answer.id } },
			h("header", h("h2", name), chooser, this.actions), this.reasoning, this.view.element, this.calls, this.fault, this.foot);
		this.draw = perFrame(() => this.update());
		on(this.answer, "change", this.draw);
		this.shownState = null;
		this.update();
	}

	close() {
		this.answer.removeEventListener("change", this.draw);
	}

	update() {
		const { answer } = this;
		this.element.setAttribute("aria-busy", String(answer.isRunning));
		this.element.classList.toggle("running", answer.isRunning);
		this.view.update();
		this.reasoning.hidden = !answer.reasoning;
		if (answer.reasoning) {
			this.reasoning.firstChild.textContent = answer.content || !answer.isRunning ? "Reasoning" : "Reasoning …";
			this.thought.update(answer.reasoning);
		}
		this.updateCalls();
		this.foot.textContent = factsOf(answer);
		this.fault.hidden = !["lost", "failed"].includes(answer.state);
		this.fault.textContent =
			answer.state === "lost" ? "The connection was lost. The answer continues when the server is back." : (answer.error?.message ?? "");
		if (this.shownState !== answer.state) this.updateActions();
		this.afterUpdate();
		if (isAtEnd && answer.isRunning) $("messages").scrollTop = 1e9;
	}

	updateCalls() {
		const { calls, isRunning } = this.answer;
		const key = JSON.stringify([calls, isRunning]);
		if (key === this.shownCalls) return;
		this.shownCalls = key;
		const isAnswered = this.message.children.length > 0;
		const isAsked = !isRunning && !isAnswered;
		const results = calls.map((call) => h("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "Result of the call, as text or JSON" }));
		const shown = this.argumentNodes();
		this.calls.replaceChildren(...calls.map((call, index) =>
			h("details.folded.call", { open: isAsked }, h("summary", "Tool call ", h("code", call.name)),
				h("pre.part", { tabIndex: 0, role: "region", "aria-label": `Arguments of call ${index + 1}` }, shown[index]), isAsked && results[index])));
		if (!calls.length || !isAsked) return;
		const send = () => this.owner.answerTools(this.message, calls, results.map((each) => each.value));
		this.calls.append(button(calls.length > 1 ? "Send the results" : "Send the result", send, { class: "primary" }));
	}

	// Shows each call's arguments as tokens if the model wrote exactly this JSON.
	argumentNodes() {
		let end = 0;
		return this.answer.calls.map(({ arguments: json }) => {
			const base = this.answer.tokenText.text.indexOf(json, end);
			if (base >= 0) end = base + json.length;
			return prettyJson(json, (start, end) => tokenNodes(this.answer, base, json, start, end));
		});
	}

	updateActions() {
		const { answer, owner } = this;
		this.shownState = answer.state;
		if (answer.isRunning) {
			this.actions.replaceChildren(plainButton("Stop", () => answer.stop()));
			return;
		}
		const isWhole = answer.state === "done" && answer.finish && !answer.branchedAt && !answer.calls.length;
		this.actions.replaceChildren(
			...(answer.canContinue ? [plainButton("Continue", () => owner.resume(answer))] : []),
			plainButton("Again", () => owner.regenerate(this.message), { title: "Answer again, with another seed" }),
			plainButton("Copy", () => copy(answer.content, "The answer is copied.")),
			...(isWhole ? [plainButton("Link", () => copyLink(answer), { title: "Copy a link that reproduces this answer" })] : []),
			...(owner.conversation.mode === "text" ? [plainButton("Edit as text", () => takeOver(answer), { title: "Move the text and the answer to the editor" })] : []),
		);
	}
}

function variants(parent, message, render, unpair = null) {
	const { length } = parent.children;
	if (unpair) return h("span.variants", plainButton("Keep this one", unpair));
	if (length < 2) return null;
	const index = parent.children.indexOf(message);
	const go = (to) => {
		parent.active = to;
		parent.pair = null;
		render();
	};
	return h("span.variants",
		plainButton("‹", () => go(index - 1), { disabled: index === 0, "aria-label": "Previous version" }),
		h("span", `${index + 1} of ${length}`),
		plainButton("›", () => go(index + 1), { disabled: index === length - 1, "aria-label": "Next version" }),
		index > 0 && plainButton("Compare", () => {
			parent.pair = [index - 1, index];
			render();
		}, { title: "Show beside the previous version" }));
}

function factsOf(answer) {
	const { ttft, rate } = answer.speed;
	const cut = { length: "cut off at its limit", tool_calls: "calls a tool" };
	return [
		answer.state === "waiting" && "waiting …",
		answer.tokens.length && `${answer.tokens.length} tokens`,
		rate && `${rate.toFixed(rate < 10 ? 1 : 0)} tok/s`,
		ttft !== null && `first token after ${ttft < 1 ? `${Math.round(1000 * ttft)} ms` : `${ttft.toFixed(1)} s`}`,
		answer.numPrompt && `prompt ${answer.numPrompt}, cached ${answer.numCached}`,
		answer.body.seed !== undefined && `seed ${answer.body.seed}`,
		answer.branchedAt && `branched at token ${answer.branchedAt.position + 1}`,
		cut[answer.finish],
		answer.state === "stopped" && "stopped",
		answer.verdict,
	].filter(Boolean).join(" · ");
}

const EXAMPLES = {
	chat: ["What is the capital of Japan?", "Name three fruits.", "Write a Python function that adds two numbers."],
	text: ["The capital of France is", "Once upon a time, a small fox", "def is_even(n):"],
};

function welcome(mode, send) {
	const text = mode === "text" ? "Write the beginning of a text. The model continues it." : "Ask a question, or try one of these:";
	return h("div.welcome", h("p", text),
		h("div.examples", EXAMPLES[mode].map((example) => button(example, () => send(example)))),
		h("p.faint", "Point at any word of an answer, or tap it, to see how the model chose it. Press ? for all keys."));
}

async function copy(text, message) {
	try {
		await navigator.clipboard.writeText(text);
		notify(message);
	} catch {
		const area = h("textarea.copied", { readOnly: true, rows: 3, "aria-label": "To copy" });
		area.value = text;
		notify("Copy it from here:", "kept", area);
		area.select();
	}
}

export async function copyLink(answer) {
	const body = { ...answer.body, model: connection.model?.model ?? answer.body.model };
	const link = await makeLink({ route: answer.route, fingerprint: answer.fingerprint, body, text: answer.content });
	history.replaceState(null, "", link.slice(location.origin.length));
	await copy(link, "The link is copied. It holds the prompt, the settings and the seed.");
}

function takeOver(answer) {
	$("composer-text").value = answer.body.prompt + answer.content;
	$("composer-text").dispatchEvent(new Event("input"));
	$("composer-text").focus();
}
