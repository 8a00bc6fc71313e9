// The page: joins its parts, and knows the keys.

import { Answer } from "./answer.js";
import { connection, key, watch } from "./api.js";
import { ConversationView, copyLink } from "./conversation.js";
import { $, announce, button, download, h, notify } from "./dom.js";
import { Engine } from "./engine.js";
import { chooseToken, chosenToken, initFunnel, releaseToken } from "./funnel.js";
import { readLink, sha256 } from "./permalink.js";
import { showPrompt } from "./prompt.js";
import { renderSettings, valuesOf } from "./settings.js";
import { Conversation, conversations, importConversations, Message, saveConversations, saveSettings, settings } from "./state.js";
import { WhatIf } from "./whatif.js";

const TABS = ["token", "whatif", "prompt", "settings", "engine"];
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
  settings.mode = conversation.mode;
  view = new ConversationView(conversation, { choose, changed: refresh });
  $("messages").replaceChildren(view.element);
  for (const mode of ["chat", "text"]) $(`mode-${mode}`).setAttribute("aria-pressed", String(conversation.mode === mode));
  const isText = conversation.mode === "text";
  $("composer").classList.toggle("text-mode", isText);
  $("composer-label").textContent = isText ? "Text" : "Message";
  $("composer-text").placeholder = isText ? "The beginning of a text" : "Message";
  $("side").classList.remove("open");
  $("messages").scrollTop = $("messages").scrollHeight;
  renderSettings();
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
  $("send").textContent = isRunning ? "Stop" : view.conversation.mode === "text" ? "Go on" : "Send";
  $("list").replaceChildren(...conversations.filter((each) => each === view.conversation || each.root.next).map((each) => h("li", {},
    button(each.name, () => open(each), { class: "plain", "aria-current": each === view.conversation ? "page" : undefined }),
    button("×", () => remove(each), { class: "plain", "aria-label": `Delete ${each.name}` }))));
  refreshTab();
}

function remove(conversation) {
  const index = conversations.indexOf(conversation);
  conversations.splice(index, 1);
  saveConversations();
  notify("The conversation is deleted", "info", button("Undo", () => {
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
  if (connection.state !== "ready") return notify("The server is not ready yet: the message stays here", "error");
  const text = area.value;
  if (view.conversation.mode === "chat") area.value = "";
  grow();
  view.send(text);
  $("messages").scrollTop = $("messages").scrollHeight;
}

function grow() {
  const area = $("composer-text");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight / 2)}px`;
}

async function importFile(file) {
  try {
    const found = importConversations(JSON.parse(await file.text()));
    open(found[0]);
    notify(`${found.length} imported`);
  } catch (error) {
    notify(`${file.name} holds no conversations of this page: ${error.message}`, "error");
  }
}

// Links

async function openLink() {
  if (connection.state !== "ready") return;
  let link;
  try {
    link = readLink(location.hash);
  } catch (error) {
    return notify(error.message, "error");
  }
  if (!link) return;
  const { body, route, fingerprint } = link;
  const model = connection.model;
  if (body.model !== model.model) notify(`The link is for the model ${body.model ?? "of another server"}; ${model.model} answers.`, "kept");
  const isChat = route === "/v1/chat/completions";
  const conversation = new Conversation(isChat ? "chat" : "text");
  const text = typeof body.prompt === "string" ? body.prompt : JSON.stringify(body.prompt);
  const messages = isChat ? body.messages.filter((each) => each.role !== "system") : [{ role: "user", content: text }];
  settings[settings.shown] = valuesOf(body);
  saveSettings();
  let last = conversation.root;
  for (const each of messages) last = last.add(messageOf(each, route, body));
  const answer = new Answer(route, { ...body, model: model.model });
  last.add(new Message("assistant", { answer }));
  conversations.unshift(conversation);
  open(conversation);
  await view.follow(answer, answer.run());
  if (answer.state !== "done" || !link.sha256) return;
  const isSame = sha256(answer.content) === link.sha256;
  answer.verdict = isSame ? "the same answer, bit for bit" : "another answer than the link's";
  answer.changed();
  const why = fingerprint === answer.fingerprint ? "though the fingerprint is the same" : `its fingerprint is ${fingerprint}, here it is ${answer.fingerprint}`;
  notify(isSame ? "The same answer as in the link, bit for bit." : `Not the answer of the link: ${why}.`, isSame ? "good" : "error");
}

function messageOf({ role, content, tool_call_id, tool_calls }, route, body) {
  const text = typeof content === "string" ? content : (content ?? []).map((part) => part.text).join("");
  if (role !== "assistant") return new Message(role === "tool" ? "tool" : "user", { content: text, callId: tool_call_id ?? null });
  const answer = new Answer(route, body);
  const calls = (tool_calls ?? []).map(({ id, function: call }) => ({ id, name: call.name, arguments: call.arguments }));
  Object.assign(answer, { content: text, calls, state: "done", finish: "stop" });
  return new Message("assistant", { answer });
}

// Instruments

function openTab(name) {
  tab = name;
  for (const each of TABS) {
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
  const words = { ready: "ready", loading: `the model is loading, ${Math.floor(100 * progress)} %`, lost: "the server does not answer; trying again", key: "a key is needed" };
  $("status").textContent = words[state];
  $("status").dataset.state = state;
  $("model").textContent = model?.model ?? "";
  if (state === "key") askKey();
  if (state !== "ready") return;
  renderSettings();
  if (!isLinkRead) openLink();
  isLinkRead = true;
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
  ["Esc", "stop the answer, or close what is open"],
  ["Alt+N", "new conversation"],
  ["Alt+E", "edit the last message"],
  ["Alt+R", "answer again, with another seed"],
  ["Alt+C", "continue an answer that was cut"],
  ["Alt+L", "copy a link to the last answer"],
  ["Alt+T", "to the tokens of the last answer; ← → Home End move, Enter pins one"],
  ["Alt+1 … 5", "token, what if, prompt, settings, engine"],
  ["/", "to the message"],
  ["?", "this help"],
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
  const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (event.altKey && !event.ctrlKey && !event.metaKey) {
    const digit = /^Digit([1-5])$/.exec(event.code);
    const command = digit ? () => openTab(TABS[digit[1] - 1]) : COMMANDS[event.code];
    if (!command) return;
    event.preventDefault();
    command();
  } else if (document.querySelector("dialog[open]")) return;
  else if (event.key === "Escape") {
    const running = view.answers.filter((answer) => answer.isRunning);
    if (running.length) running.forEach((answer) => answer.stop());
    else if (isNarrow()) showPanel(false);
    releaseToken();
    $("side").classList.remove("open");
  } else if (event.key === "?" && !isTyping) $("help-dialog").showModal();
  else if (event.key === "/" && !isTyping) {
    event.preventDefault();
    $("composer-text").focus();
  }
}

function onTabKey(event) {
  const to = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!to || event.target.role !== "tab") return;
  const name = TABS[(TABS.indexOf(tab) + to + TABS.length) % TABS.length];
  openTab(name);
  $(`tab-${name}`).focus();
}

function applyView() {
  document.documentElement.style.colorScheme = settings.view.theme || "light dark";
  document.body.classList.toggle("tinted", settings.view.isTinted);
}

function start() {
  applyView();
  initFunnel((answer, index, token) => view.branch(answer, index, token));
  $("keys").replaceChildren(h("tbody", {}, KEYS.map(([name, what]) => h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, name)), h("td", {}, what)))));
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("composer-text").addEventListener("input", grow);
  $("composer-text").addEventListener("keydown", (event) => {
    const isSent = view.conversation.mode === "text" ? event.ctrlKey || event.metaKey : !event.shiftKey;
    if (event.key !== "Enter" || !isSent || event.isComposing || event.altKey) return;
    event.preventDefault();
    send();
  });
  $("new").addEventListener("click", () => newConversation());
  for (const mode of ["chat", "text"]) $(`mode-${mode}`).addEventListener("click", () => newConversation(mode));
  $("menu").addEventListener("click", () => $("menu").setAttribute("aria-expanded", String($("side").classList.toggle("open"))));
  $("help").addEventListener("click", () => $("help-dialog").showModal());
  $("key").addEventListener("click", askKey);
  $("key-dialog").addEventListener("close", () => {
    if ($("key-dialog").returnValue !== "ok") return;
    key.set($("key-text").value.trim());
    watch();
  });
  $("import").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => $("file").files[0] && importFile($("file").files[0]));
  $("export").addEventListener("click", () => download("conversations.json", { conversations }));
  $("panel-toggle").addEventListener("click", () => showPanel(!document.body.classList.contains("panel-open")));
  $("panel-close").addEventListener("click", () => showPanel(false));
  for (const name of TABS) $(`tab-${name}`).addEventListener("click", () => openTab(name));
  document.querySelector("[role=tablist]").addEventListener("keydown", onTabKey);
  document.addEventListener("keydown", onKey);
  document.addEventListener("panel", (event) => openTab(event.detail));
  document.addEventListener("view", () => {
    applyView();
    view.render();
  });
  document.addEventListener("visibilitychange", refreshTab);
  addEventListener("hashchange", openLink);
  connection.addEventListener("change", showConnection);
  conversations.length ? open(conversations[0]) : newConversation();
  showPanel(!isNarrow());
  watch().then(() => announce("The model is ready"));
}

start();
