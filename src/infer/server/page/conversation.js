// The conversation: its messages, what can be done with each, and the answers as they come.

import { Answer } from "./answer.js";
import { connection } from "./api.js";
import { $, announce, button, h, notify, perFrame } from "./dom.js";
import { prettyJson } from "./json.js";
import { makeLink } from "./permalink.js";
import { makeBody, routeOf, showFault } from "./settings.js";
import { Message, saveConversations, settings } from "./state.js";
import { listenToTokens, PartView, tokenNodes, TokenView } from "./tokens.js";

// Whether the end is in view: asked when it scrolls, for asking lays everything out.
let isAtEnd = true;
$("messages").addEventListener("scroll", ({ target }) => (isAtEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 60));

export class ConversationView {
  // `choose(answer, index, isPinned)` shows a token.
  constructor(conversation, { choose, changed }) {
    Object.assign(this, { conversation, choose, changed, panes: new Map(), messageOf: new Map() });
    this.element = h("div", { class: "conversation" });
    listenToTokens(this.element, (span) => this.panes.get(span.closest(".answer").dataset.id).answer, choose);
    this.render();
  }

  render() {
    for (const pane of this.panes.values()) pane.close();
    this.panes.clear();
    const { path } = this.conversation;
    this.element.replaceChildren(...path.map((message) => this.article(message)));
    this.element.classList.toggle("paired", this.element.querySelector(".pair") !== null);
    if (!path.length) this.element.append(welcome(this.conversation.mode));
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
      h("header", {}, h("h2", {}, name), variants(parent, message, () => this.render()),
        h("span", { class: "actions" }, button("Edit", (event) => this.edit(message, event.target.closest("article")), { class: "plain" }))),
      h("div", { class: "text" }, message.content));
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

  // Marks the first token in which two answers differ.
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

  // The results of an answer's calls, one message each.
  answerTools(parent, calls, results) {
    this.ask(calls.reduce((last, call, index) => last.add(new Message("tool", { content: results[index], callId: call.id })), parent));
  }

  // Answers a message with the settings; with both, where two are compared.
  ask(parent) {
    const names = settings.isCompared ? ["a", "b"] : [settings.shown];
    const made = [];
    for (const name of names) {
      try {
        made.push(new Answer(routeOf(this.conversation), makeBody(settings[name], this.conversation, parent)));
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
    if (answer.state === "done") announce(`The answer has ended, ${length} tokens`);
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
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done();
      if (event.key === "Escape") this.render();
    });
    article.querySelector(".text").replaceWith(h("div", { class: "edit" }, area,
      h("div", { class: "actions" }, button("Answer this", done, { class: "primary" }), button("Cancel", () => this.render()))));
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

  // Whose marks have changed.
  remark(answer) {
    this.panes.get(answer.id)?.view.remark();
  }
}

class AnswerPane {
  constructor(message, owner, chooser) {
    Object.assign(this, { message, owner, answer: message.answer, afterUpdate: () => {} });
    this.view = new TokenView(this.answer, settings.view.isRaw);
    this.reasoning = h("details", { class: "folded", hidden: true }, h("summary", {}), h("div", { class: "text part" }));
    this.thought = new PartView(this.answer, this.reasoning.lastChild);
    this.calls = h("div", { class: "calls" });
    this.foot = h("p", { class: "facts" });
    this.fault = h("p", { class: "fault", hidden: true });
    this.actions = h("span", { class: "actions" });
    this.element = h("article", { class: "message answer", "aria-label": "Answer", data: { id: this.answer.id } },
      h("header", {}, h("h2", {}, "Answer"), chooser, this.actions), this.reasoning, this.view.element, this.calls, this.fault, this.foot);
    this.draw = perFrame(() => this.update());
    this.answer.addEventListener("change", this.draw);
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
      answer.state === "lost" ? "The server was lost. The answer goes on when it is back." : (answer.error?.message ?? "");
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
    const results = calls.map((call) => h("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "Its result, as text or JSON" }));
    const shown = this.argumentNodes();
    this.calls.replaceChildren(...calls.map((call, index) =>
      h("details", { class: "folded call", open: isAsked }, h("summary", {}, "Tool call ", h("code", {}, call.name)),
        h("pre", { class: "part", tabIndex: 0, role: "region", "aria-label": `Arguments of call ${index + 1}` }, shown[index]), isAsked && results[index])));
    if (!calls.length || !isAsked) return;
    const send = () => this.owner.answerTools(this.message, calls, results.map((each) => each.value));
    this.calls.append(button(calls.length > 1 ? "Send the results" : "Send the result", send, { class: "primary" }));
  }

  // The arguments of each call, as their tokens where the model wrote this very JSON.
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
      this.actions.replaceChildren(button("Stop", () => answer.stop(), { class: "plain" }));
      return;
    }
    const isWhole = answer.state === "done" && answer.finish && !answer.branchedAt && !answer.calls.length;
    this.actions.replaceChildren(
      ...(answer.canContinue ? [button("Continue", () => owner.resume(answer), { class: "plain" })] : []),
      button("Again", () => owner.regenerate(this.message), { class: "plain", title: "Answer again, with another seed" }),
      button("Copy", () => copy(answer.content, "The answer is copied"), { class: "plain" }),
      ...(isWhole ? [button("Link", () => copyLink(answer), { class: "plain", title: "A link that gives this very answer again" })] : []),
      ...(owner.conversation.mode === "text" ? [button("Take over", () => takeOver(answer), { class: "plain", title: "Text and answer into the editor" })] : []),
    );
  }
}

function variants(parent, message, render, unpair = null) {
  const { length } = parent.children;
  if (unpair) return h("span", { class: "variants" }, button("Keep this one", unpair, { class: "plain" }));
  if (length < 2) return null;
  const index = parent.children.indexOf(message);
  const go = (to) => {
    parent.active = to;
    parent.pair = null;
    render();
  };
  return h("span", { class: "variants" },
    button("‹", () => go(index - 1), { class: "plain", disabled: index === 0, "aria-label": "The version before" }),
    h("span", {}, `${index + 1} of ${length}`),
    button("›", () => go(index + 1), { class: "plain", disabled: index === length - 1, "aria-label": "The next version" }),
    index > 0 && button("Compare", () => {
      parent.pair = [index - 1, index];
      render();
    }, { class: "plain", title: "Beside the version before" }));
}

function factsOf(answer) {
  const { ttft, rate } = answer.speed;
  const cut = { length: "cut by its length", tool_calls: "calls a tool" };
  return [
    answer.state === "waiting" && "waiting …",
    answer.tokens.length && `${answer.tokens.length} tokens`,
    rate && `${rate.toFixed(rate < 10 ? 1 : 0)} tok/s`,
    ttft !== null && `first token after ${ttft < 1 ? `${Math.round(1000 * ttft)} ms` : `${ttft.toFixed(1)} s`}`,
    answer.numPrompt && `prompt ${answer.numPrompt}, cached ${answer.numCached}`,
    `seed ${answer.body.seed}`,
    answer.branchedAt && `branched at token ${answer.branchedAt.position + 1}`,
    cut[answer.finish],
    answer.state === "stopped" && "stopped",
    answer.verdict,
  ].filter(Boolean).join(" · ");
}

function welcome(mode) {
  const text = mode === "text" ? "Write the beginning of a text; the model goes on with it." : "Ask something.";
  return h("div", { class: "welcome" }, h("p", {}, text),
    h("p", { class: "faint" }, "Point at a word of the answer, or tap it, to see how it was chosen. Press ? for all keys."));
}

async function copy(text, message) {
  try {
    await navigator.clipboard.writeText(text);
    notify(message);
  } catch {
    const area = h("textarea", { class: "copied", readOnly: true, rows: 3, "aria-label": "To copy" });
    area.value = text;
    notify("Copy it from here:", "kept", area);
    area.select();
  }
}

export async function copyLink(answer) {
  const body = { ...answer.body, model: connection.model?.model ?? answer.body.model };
  const link = await makeLink({ route: answer.route, fingerprint: answer.fingerprint, body, text: answer.content });
  history.replaceState(null, "", link.slice(location.origin.length));
  await copy(link, "The link is copied: it holds the prompt, the settings and the seed");
}

function takeOver(answer) {
  $("composer-text").value = answer.body.prompt + answer.content;
  $("composer-text").dispatchEvent(new Event("input"));
  $("composer-text").focus();
}
