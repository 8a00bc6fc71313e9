// The page: connects its parts and handles the keys.

import { Answer, randomSeed } from "./answer.js";
import { connection, key, watch } from "./api.js";
import { ConversationView, copyLink } from "./conversation.js";
import { $, announce, button, download, h, notify, on, plainButton } from "./dom.js";
import { Engine } from "./engine.js";
import { chooseToken, chosenToken, initFunnel, releaseToken } from "./funnel.js";
import { askFirst } from "./link.js";
import { initModels } from "./models.js";
import { isSystem, readLink, sha256, textOf } from "./permalink.js";
import { showPrompt } from "./prompt.js";
import { renderSettings, showSettingsOf, valuesOf } from "./settings.js";
import { Conversation, conversations, importConversations, Message, saveConversations, settings } from "./state.js";
import { WhatIf } from "./whatif.js";

const TABS = { token: "Token", whatif: "What if", prompt: "Prompt", settings: "Settings", engine: "Engine" };
const NAMES = Object.keys(TABS);
const isNarrow = () => matchMedia("(max-width: 1100px)").matches;
let view = null;
let tab = "token";
let isLinkRead = false;
const engine = new Engine();
const whatIf = new WhatIf({
	remark: (answer) => view.remark(answer),
	go: (answer, index) => {
		openTab("token");
		chooseToken(answer, index, true);
		document.querySelector(`.answer[data-id="${answer.id}"] [data-i="${index}"]`)?.scrollIntoView({ block: "center" });
	},
	branch: (answer, index, token) => view.branch(answer, index, token),
});

// Conversations

function open(conversation) {
	releaseToken();
	if (!conversation.settings) settings.mode = conversation.mode;
	view = new ConversationView(conversation, { choose, changed: refresh, sendExample });
	$("messages").replaceChildren(view.element);
	for (const mode of ["chat", "text"]) $(`mode-${mode}`).setAttribute("aria-pressed", String(conversation.mode === mode));
	const isText = conversation.mode === "text";
	$("composer").classList.toggle("text-mode", isText);
	$("composer-label").textContent = isText ? "Text" : "Message";
	$("composer-text").placeholder = isText ? "The beginning of a text" : "Message";
	showDrawer(false);
	$("messages").scrollTop = $("messages").scrollHeight;
	showSettingsOf(conversation);
	refresh();
}

function choose(answer, index, isPinned) {
	if (isPinned) openTab(tab === "whatif" ? "whatif" : "token");
	else if (tab !== "token") return;
	chooseToken(answer, index, isPinned);
}

function newConversation(mode = settings.mode ?? "chat") {
	const conversation = new Conversation(mode);
	conversations.unshift(conversation);
	open(conversation);
	$("composer-text").focus();
}

function refresh() {
	if (!view) return;
	const isRunning = view.answers.some((answer) => answer.isRunning);
	$("send").textContent = isRunning ? "Stop" : view.conversation.mode === "text" ? "Continue" : "Send";
	$("list").replaceChildren(...conversations.filter((each) => each === view.conversation || each.root.next).map((each) => h("li",
		plainButton(each.name, () => open(each), { "aria-current": each === view.conversation ? "page" : undefined }),
		plainButton("×", () => remove(each), { "aria-label": `Delete ${each.name}` }))));
	refreshTab();
}

function remove(conversation) {
	const index = conversations.indexOf(conversation);
	conversations.splice(index, 1);
	saveConversations();
	notify("The conversation was deleted.", "info", button("Undo", () => {
		conversations.splice(index, 0, conversation);
		saveConversations();
		open(conversation);
	}));
	if (conversation === view.conversation) conversations.length ? open(conversations[0]) : newConversation();
	else refresh();
}

function send() {
	const running = view.answers.filter((answer) => answer.isRunning);
	if (running.length) return running.forEach((answer) => answer.stop());
	const area = $("composer-text");
	if (!area.value.trim()) return area.focus();
	if (connection.state !== "ready") return notify("The server is not ready yet. Your message is kept.", "error");
	const text = area.value;
	if (view.conversation.mode === "chat") area.value = "";
	grow();
	view.send(text);
	$("messages").scrollTop = $("messages").scrollHeight;
}

function sendExample(text) {
	$("composer-text").value = text;
	send();
}

function showDrawer(isOpen) {
	document.body.classList.toggle("drawer-open", isOpen);
	$("menu").setAttribute("aria-expanded", String(isOpen));
}

const isDrawerOpen = () => document.body.classList.contains("drawer-open");

function grow() {
	const area = $("composer-text");
	area.style.height = "auto";
	area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight / 2)}px`;
}

async function importFile(file) {
	try {
		const found = importConversations(JSON.parse(await file.text()));
		open(found[0]);
		notify(`Imported conversations: ${found.length}.`);
	} catch (error) {
		notify(`${file.name} holds no conversations of this page: ${error.message}.`, "error");
	}
}

// Links

async function openLink() {
	if (connection.state !== "ready") return void (isLinkRead = false);
	const { hash } = location;
	let link;
	try {
		link = readLink(hash);
	} catch (error) {
		return notify(error.message, "error");
	}
	if (!link) return;
	const isWanted = await askFirst(link, connection.model.model);
	if (location.hash === hash) history.replaceState(null, "", location.pathname);
	if (isWanted) await answerLink(link);
}

// Answers the request of a link in a conversation that has the link's settings.
async function answerLink({ body: { n, stream, stream_options, ...body }, route, fingerprint, sha256: expected }) {
	const isChat = route === "/v1/chat/completions";
	const conversation = new Conversation(isChat ? "chat" : "text");
	const text = typeof body.prompt === "string" ? body.prompt : JSON.stringify(body.prompt);
	const messages = isChat ? body.messages.filter((each) => !isSystem(each)) : [{ role: "user", content: text }];
	conversation.settings = valuesOf(body);
	let last = conversation.root;
	for (const each of messages) last = last.add(messageOf(each, route, body));
	const answer = new Answer(route, { ...body, model: connection.model.model, seed: body.seed ?? randomSeed() });
	last.add(new Message("assistant", { answer }));
	conversations.unshift(conversation);
	open(conversation);
	await view.follow(answer, answer.run());
	if (answer.state !== "done" || !expected) return;
	const isSame = sha256(answer.content) === expected;
	answer.verdict = isSame ? "the same answer, bit for bit" : "not the answer of the link";
	answer.changed();
	const why = fingerprint === answer.fingerprint ? "The fingerprint is the same" : `The link's fingerprint is ${fingerprint}, this server's is ${answer.fingerprint}`;
	notify(isSame ? "This is the answer of the link, bit for bit." : `This is not the answer of the link. ${why}.`, isSame ? "good" : "error");
}

function messageOf(message, route, body) {
	const { role, tool_call_id, tool_calls } = message;
	const text = textOf(message);
	if (role !== "assistant") return new Message(role === "tool" ? "tool" : "user", { content: text, callId: tool_call_id ?? null });
	const answer = new Answer(route, body);
	const calls = (tool_calls ?? []).map(({ id, function: call }) => ({ id, name: call.name, arguments: call.arguments }));
	Object.assign(answer, { content: text, calls, state: "done", finish: "stop" });
	return new Message("assistant", { answer });
}

// Instruments

function openTab(name) {
	tab = name;
	for (const each of NAMES) {
		$(`tab-${each}`).setAttribute("aria-selected", String(each === name));
		$(`tab-${each}`).tabIndex = each === name ? 0 : -1;
		$(each).hidden = each !== name;
	}
	showPanel(true);
	refreshTab();
}

function showPanel(isShown) {
	document.body.classList.toggle("panel-open", isShown);
	$("panel-toggle").setAttribute("aria-expanded", String(isShown));
	if (isShown && tab === "engine" && !document.hidden) engine.start();
	else engine.stop();
}

function refreshTab() {
	const last = chosenToken().answer && view?.answers.includes(chosenToken().answer) ? chosenToken().answer : view?.answers.at(-1);
	if (tab === "whatif") whatIf.show(last ?? null);
	else {
		whatIf.clear();
		whatIf.answer = null;
	}
	if (tab === "prompt") showPrompt(last ?? null);
	if (tab === "engine" && document.body.classList.contains("panel-open")) engine.start();
	else engine.stop();
}

// The server

function showConnection() {
	const { state, progress, model } = connection;
	const words = { ready: "ready", loading: `loading the model, ${Math.floor(100 * progress)} %`, lost: "no answer from the server, retrying", key: "an API key is needed" };
	$("status").textContent = words[state];
	$("status").dataset.state = state;
	$("model").textContent = model?.model ?? "";
	if (state === "key") askKey();
	if (state !== "ready") return;
	renderSettings();
	const isNew = !isLinkRead;
	isLinkRead = true;
	if (isNew) openLink();
	for (const answer of view.answers.filter((each) => each.state === "lost")) view.resume(answer);
}

function askKey() {
	const dialog = $("key-dialog");
	if (dialog.open) return;
	$("key-text").value = key.get();
	dialog.showModal();
}

// Keys

const KEYS = [
	["Enter", "send; Shift+Enter begins a new line"],
	["Esc", "stop the answer, or close the list or the panel"],
	["Alt+N", "new conversation"],
	["Alt+E", "edit the last message"],
	["Alt+R", "answer again, with another seed"],
	["Alt+C", "continue an answer that was cut off"],
	["Alt+L", "copy a link to the last answer"],
	["Alt+T", "go to the tokens of the last answer; ← → Home End move, Enter pins a token"],
	["Alt+1 … 5", "token, what if, prompt, settings, engine"],
	["/", "go to the message field"],
	["?", "show this help"],
];

const COMMANDS = {
	KeyN: () => newConversation(),
	KeyE: () => view.editLast(),
	KeyR: () => withLast((answer) => !answer.isRunning && view.regenerate(view.panes.get(answer.id).message)),
	KeyC: () => withLast((answer) => answer.canContinue && view.resume(answer)),
	KeyL: () => withLast((answer) => answer.state === "done" && !answer.branchedAt && copyLink(answer)),
	KeyT: () => document.querySelector(".conversation > :last-child .tokens")?.querySelector("[data-i]")?.dispatchEvent(new KeyboardEvent("keydown", { key: "Home", bubbles: true })),
};

function withLast(act) {
	const answer = view.answers.at(-1);
	if (answer) act(answer);
}

function onKey(event) {
	if (document.querySelector("dialog[open]")) return;
	const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
	if (event.altKey && !event.ctrlKey && !event.metaKey) {
		const digit = /^Digit([1-5])$/.exec(event.code);
		const command = digit ? () => openTab(NAMES[digit[1] - 1]) : COMMANDS[event.code];
		if (!command) return;
		event.preventDefault();
		command();
	} else if (event.key === "Escape") {
		if (isDrawerOpen()) {
			showDrawer(false);
			return $("menu").focus();
		}
		const running = view.answers.filter((answer) => answer.isRunning);
		if (running.length) running.forEach((answer) => answer.stop());
		else if (isNarrow()) showPanel(false);
		releaseToken();
	} else if (event.key === "?" && !isTyping) $("help-dialog").showModal();
	else if (event.key === "/" && !isTyping) {
		event.preventDefault();
		$("composer-text").focus();
	}
}

function onTabKey(event) {
	const to = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
	if (!to || event.target.role !== "tab") return;
	const name = NAMES[(NAMES.indexOf(tab) + to + NAMES.length) % NAMES.length];
	openTab(name);
	$(`tab-${name}`).focus();
}

function applyView() {
	document.documentElement.style.colorScheme = settings.view.theme || "light dark";
	document.body.classList.toggle("tinted", settings.view.isTinted);
}

function start() {
	applyView();
	for (const [name, label] of Object.entries(TABS)) {
		document.querySelector("[role=tablist]").append(button(label, () => openTab(name), { role: "tab", id: `tab-${name}`, "aria-controls": name }));
		$("panel").append(h("section", { id: name, role: "tabpanel", "aria-labelledby": `tab-${name}`, tabIndex: 0 }));
	}
	$("token").append(h("p.faint", "Point at a token of an answer, or tap it, to see how the model chose it."));
	initFunnel((answer, index, token) => view.branch(answer, index, token));
	$("keys").replaceChildren(h("tbody", KEYS.map(([name, what]) => h("tr", h("th", { scope: "row" }, h("kbd", name)), h("td", what)))));
	on($("composer"), "submit", (event) => {
		event.preventDefault();
		send();
	});
	on($("composer-text"), "input", grow);
	on($("composer-text"), "keydown", (event) => {
		const isSent = view.conversation.mode === "text" ? event.ctrlKey || event.metaKey : !event.shiftKey;
		if (event.key !== "Enter" || !isSent || event.isComposing || event.altKey) return;
		event.preventDefault();
		send();
	});
	const clicks = {
		new: () => newConversation(),
		menu: () => showDrawer(!isDrawerOpen()),
		scrim: () => showDrawer(false),
		help: () => $("help-dialog").showModal(),
		key: askKey,
		import: () => $("file").click(),
		export: () => download("conversations.json", { conversations }),
		"panel-toggle": () => showPanel(!document.body.classList.contains("panel-open")),
		"panel-close": () => showPanel(false),
	};
	for (const [id, act] of Object.entries(clicks)) on($(id), "click", act);
	for (const mode of ["chat", "text"]) on($(`mode-${mode}`), "click", () => newConversation(mode));
	on($("key-dialog"), "close", () => {
		if ($("key-dialog").returnValue !== "ok") return;
		key.set($("key-text").value.trim());
		watch();
	});
	on($("file"), "change", () => $("file").files[0] && importFile($("file").files[0]));
	on(document.querySelector("[role=tablist]"), "keydown", onTabKey);
	on(document, "keydown", onKey);
	on(document, "panel", (event) => openTab(event.detail));
	on(document, "view", () => {
		applyView();
		view.render();
	});
	on(document, "visibilitychange", refreshTab);
	addEventListener("hashchange", openLink);
	on(connection, "change", showConnection);
	initModels();
	conversations.length ? open(conversations[0]) : newConversation();
	openTab("token");
	showPanel(!isNarrow());
	watch().then(() => announce("The model is ready"));
}

start();
