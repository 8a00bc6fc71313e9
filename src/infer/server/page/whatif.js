// What if: the same logits sampled with other settings, at all places of an answer. What the candidates that are known
// do not tell, the server is asked for once the sliders rest.

import { ApiError, connection, LostError, post } from "./api.js";
import { $, button, h, perFrame, shown } from "./dom.js";
import { chosenWith, settingsOf } from "./noise.js";

const NUM_CANDIDATES = 40;
const AT_ONCE = 16; // tokens of a request
const REST = 500; // milliseconds
const MOST = 256;
const SLIDERS = [["temperature", "Temperature", 0, 2, 0.05], ["top_k", "Top-k", 0, 100, 1], ["top_p", "Top-p", 0.01, 1, 0.01], ["min_p", "Min-p", 0, 0.5, 0.01]];

export class WhatIf {
  // `remark(answer)` shows the marks, `go(answer, index)` a token, `branch(answer, index, token)` goes on from it.
  constructor({ remark, go, branch }) {
    Object.assign(this, { remark, go, branch, answer: null, values: null, exact: new Map(), timer: 0 });
    this.draw = perFrame(() => this.update());
  }

  show(answer) {
    if (this.answer === answer) return;
    this.clear();
    Object.assign(this, { answer, values: null, result: null });
    if (!answer?.tokens.length || answer.isRunning) {
      $("whatif").replaceChildren(h("p", { class: "faint" }, "When an answer has ended, its tokens can be chosen again here with other settings, and the first one that differs is marked."));
      this.answer = null;
      return;
    }
    this.load(answer);
  }

  clear() {
    if (!this.answer?.otherwise) return;
    this.answer.otherwise = null;
    this.remark(this.answer);
  }

  async load(answer) {
    const status = h("p", { class: "facts", role: "status" }, "Reading the candidates …");
    $("whatif").replaceChildren(status);
    const count = Math.min(answer.tokens.length, MOST);
    try {
      for (let first = 0; first < count; first += AT_ONCE) {
        await answer.trace(first, Math.min(AT_ONCE, count - first), NUM_CANDIDATES);
        if (this.answer !== answer) return;
        if (first === 0) this.form(answer);
        this.draw();
      }
    } catch (error) {
      if (!(error instanceof ApiError || error instanceof LostError)) throw error;
      $("whatif").append(h("p", { class: "fault" }, error.message));
    }
  }

  form(answer) {
    const own = settingsOf(answer.traces.get(0));
    this.values = { ...own, seed: own.seed ?? answer.body.seed };
    this.exact = new Map();
    const fields = SLIDERS.map(([name, label, min, max, step]) => {
      const output = h("output", {}, String(+this.values[name].toFixed(3)));
      const input = h("input", { type: "range", id: `what-${name}`, min: String(min), max: String(max), step: String(step) });
      input.value = this.values[name];
      input.addEventListener("input", () => {
        this.values[name] = Number(input.value);
        output.textContent = input.value;
        this.change();
      });
      return h("div", { class: "field number" }, h("label", { for: `what-${name}` }, label), input, output);
    });
    const seed = h("input", { type: "number", id: "what-seed" });
    seed.value = this.values.seed;
    seed.addEventListener("input", () => {
      this.values.seed = Math.trunc(Number(seed.value)) || 0;
      this.change();
    });
    this.result = h("div", { role: "status", class: "result" });
    $("whatif").replaceChildren(h("p", { class: "faint" }, "The same logits, sampled otherwise:"), ...fields,
      h("div", { class: "field" }, h("label", { for: "what-seed" }, "Seed"), seed),
      button("As it was", () => this.form(answer), { class: "plain" }), this.result);
    this.draw();
  }

  change() {
    this.exact = new Map();
    this.draw();
  }

  // What the server chooses with these settings from place `first` on.
  ask(answer, first) {
    clearTimeout(this.timer);
    const { exact, values } = this;
    this.timer = setTimeout(async () => {
      const body = { ...answer.sharedBody(), ...values, answer_token_ids: answer.ids, position: first, num_candidates: 1 };
      try {
        const { tokens } = await post("/v1/trace", { ...body, num_tokens: Math.min(answer.tokens.length, MOST) - first });
        tokens.forEach((each, index) => exact.set(first + index, each.candidates.find(({ token_id }) => token_id === each.token_id)));
      } catch (error) {
        if (!(error instanceof ApiError || error instanceof LostError)) throw error;
        exact.set(-1, error.message);
      }
      if (this.exact === exact) this.draw();
    }, REST);
  }

  update() {
    const { answer, values } = this;
    if (!answer || !values || !this.result) return;
    const found = { differs: [], unknown: [], num: 0 };
    answer.otherwise = new Map();
    for (let index = 0; index < Math.min(answer.tokens.length, MOST); index++) {
      const trace = answer.traces.get(index);
      if (!trace?.stages) break;
      found.num++;
      if (answer.tokens[index].origin === "given") continue;
      const chosen = this.exact.get(index) ?? chosenWith(trace, values, connection.model.vocab_size);
      if (chosen === null) {
        found.unknown.push(index);
        if (!found.differs.length) answer.otherwise.set(index, "untold");
      } else if (chosen.token_id !== answer.tokens[index].id) {
        answer.otherwise.set(index, found.differs.length ? "later" : "first-other");
        found.differs.push({ index, chosen });
      }
    }
    this.remark(answer);
    this.result.replaceChildren(...this.lines(answer, found));
    const isRead = found.num === Math.min(answer.tokens.length, MOST);
    if (found.unknown.length && isRead && !this.exact.size) this.ask(answer, found.unknown[0]);
  }

  lines(answer, { differs, unknown, num }) {
    const [first] = differs;
    if (unknown.length && unknown[0] < (first?.index ?? Infinity)) {
      const why = this.exact.get(-1) ?? "the server is asked …";
      return [h("p", {}, `From token ${unknown[0] + 1} on, ${NUM_CANDIDATES} candidates do not tell what would be chosen: ${why}`)];
    }
    const lines = [h("p", {}, first ? `Token ${first.index + 1} would have been another one: ` : `All ${num} tokens would be the same.`,
      first && h("b", {}, shown(answer.tokenText.of(first.index))), first && " → ", first && h("b", { class: "other" }, shown(first.chosen.text)))];
    if (first) {
      lines.push(h("div", { class: "row" }, button("Show it", () => this.go(answer, first.index)),
        button("Branch there", () => this.branch(answer, first.index, { id: first.chosen.token_id }), { class: "primary" })));
      if (differs.length > 1) lines.push(h("p", { class: "faint" }, `Of what follows, ${differs.length - 1} more would differ if the text before them stayed as it is.`));
    }
    if (answer.tokens.length > MOST) lines.push(h("p", { class: "faint" }, `The first ${MOST} tokens are looked at.`));
    return lines;
  }
}
