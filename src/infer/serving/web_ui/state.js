// Conversations, settings and presets are kept in this browser. A conversation is a tree of messages.

import { Answer } from "./answer.js";

const CONVERSATIONS = "infer.conversations";
const SETTINGS = "infer.settings";
const PRESETS = "infer.presets";
const MOST_BYTES = 3_000_000;

function read(name, otherwise) {
	try {
		return JSON.parse(localStorage.getItem(name)) ?? otherwise;
	} catch {
		return otherwise;
	}
}

function write(name, value) {
	try {
		localStorage.setItem(name, JSON.stringify(value));
		return true;
	} catch {
		return false; // the storage is full or forbidden
	}
}

// Settings `a`, and `b` to compare with. The model's default holds for an absent field.
export const settings = { a: {}, b: {}, isCompared: false, shown: "a", view: { isTinted: false, isRaw: false, theme: "" }, ...read(SETTINGS, {}) };
export const saveSettings = () => write(SETTINGS, settings);

export const BUILT_IN = {
	"Model defaults": {},
	Greedy: { temperature: 0 },
	Careful: { temperature: 0.3, top_p: 0.9 },
	Lively: { temperature: 1, min_p: 0.05 },
};
export const presets = read(PRESETS, {});
export const savePresets = () => write(PRESETS, presets);

let count = 0;
const newId = () => `${Date.now().toString(36)}${(count++).toString(36)}`;

// {role, content} of a user, {role: "tool", content, callId}, or {role: "assistant", answer}.
export class Message {
	constructor(role, values = {}, id = newId()) {
		Object.assign(this, { id, role, content: "", answer: null, callId: null, children: [], active: 0, pair: null }, values);
	}

	get next() {
		return this.children[this.active] ?? null;
	}

	add(message) {
		this.active = this.children.push(message) - 1;
		return message;
	}

	toJSON() {
		const { id, role, content, answer, callId, children, active, pair } = this;
		return { id, role, content, answer, callId, children, active, pair };
	}

	static from(saved) {
		const answer = saved.answer && Answer.from(saved.answer);
		return new Message(saved.role, { ...saved, answer, children: saved.children.map(Message.from) }, saved.id);
	}
}

export class Conversation {
	constructor(mode = "chat", values = {}) {
		Object.assign(this, { id: newId(), mode, title: "", changedAt: Date.now(), root: new Message("root"), settings: null, ...values });
	}

	// The messages that are shown, from the first to the last.
	get path() {
		const path = [];
		for (let message = this.root.next; message; message = message.next) path.push(message);
		return path;
	}

	get last() {
		return this.path.at(-1) ?? this.root;
	}

	parentOf(message, within = this.root) {
		if (within.children.includes(message)) return within;
		for (const child of within.children) {
			const found = this.parentOf(message, child);
			if (found) return found;
		}
		return null;
	}

	get name() {
		const first = this.root.next;
		return this.title || (first?.content || "New conversation").trim().slice(0, 60);
	}

	// Returns the messages up to `last` in the server's format.
	messagesTo(last, system) {
		const found = system ? [{ role: "system", content: system }] : [];
		for (let message = this.root.next; message; message = message.next) {
			found.push(asSent(message));
			if (message === last) break;
		}
		return found;
	}

	toJSON() {
		const { id, mode, title, changedAt, root, settings } = this;
		return { id, mode, title, changedAt, root, settings };
	}

	static from(saved) {
		return new Conversation(saved.mode, { ...saved, settings: saved.settings ? { ...saved.settings } : null, root: Message.from(saved.root) });
	}
}

function asSent({ role, content, answer, callId }) {
	if (role === "tool") return { role, content, tool_call_id: callId };
	if (role !== "assistant") return { role, content };
	const calls = answer.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
	return { role, content: answer.content, ...(calls.length ? { tool_calls: calls } : {}) };
}

export const conversations = [];
for (const saved of read(CONVERSATIONS, [])) {
	try {
		conversations.push(Conversation.from(saved));
	} catch (error) {
		console.warn("A conversation cannot be read and is left out.", error);
	}
}

// Keeps as many of the latest conversations as fit.
export function saveConversations() {
	conversations.sort((a, b) => b.changedAt - a.changedAt);
	const texts = [];
	let size = 0;
	for (const each of conversations.filter((each) => each.root.next)) {
		const text = JSON.stringify(each);
		size += text.length;
		if (texts.length && size > MOST_BYTES) break;
		texts.push(text);
	}
	for (; texts.length; texts.pop()) {
		try {
			localStorage.setItem(CONVERSATIONS, `[${texts.join(",")}]`);
			return;
		} catch {
			continue;
		}
	}
	localStorage.removeItem(CONVERSATIONS);
}

// Throws an Error if the value holds no conversations.
export function importConversations(value) {
	const all = Array.isArray(value?.conversations) ? value.conversations : [value];
	const found = all.map((each) => Conversation.from(each));
	if (!found.every((each) => each.root.children.length)) throw new Error("it has no message");
	for (const each of found) {
		const index = conversations.findIndex((other) => other.id === each.id);
		if (index >= 0) conversations.splice(index, 1);
		conversations.unshift(each);
	}
	saveConversations();
	return found;
}
