// How answers are sampled and what they are held to: the form, its presets, and the body of a request that it makes.

import { randomSeed } from "./answer.js";
import { ApiError, connection } from "./api.js";
import { $, button, h, notify } from "./dom.js";
import { JsonEditor, JsonFault } from "./json.js";
import { BUILT_IN, presets, savePresets, saveSettings, settings } from "./state.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, off: 1, hint: "0 takes the likeliest token" },
  { name: "top_k", label: "Top-k", min: 0, max: 200, step: 1, off: 0, hint: "keep so many candidates; 0 keeps all" },
  { name: "top_p", label: "Top-p", min: 0.01, max: 1, step: 0.01, off: 1, hint: "keep the likeliest that reach this share" },
  { name: "min_p", label: "Min-p", min: 0, max: 0.99, step: 0.01, off: 0, hint: "drop what is less likely than this share of the first" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, step: 0.05, off: 1 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, off: 0 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, off: 0 },
  { name: "max_tokens", label: "Longest answer, tokens", min: 1, max: 4096, step: 1, off: 512 },
];
const FORMATS = [["", "Any text"], ["json_object", "A JSON object"], ["json_schema", "JSON by a schema"], ["regex", "A regular expression"],
  ["grammar", "A grammar (Lark)"], ["choice", "One of these lines"]];
const JSON_FIELDS = { schema: "response_format.json_schema.schema", tools: "tools", other: "" };

const controls = new Map(); // field → its element, of the set that is shown
const editors = {};

const shownSet = () => settings[settings.shown];

function set(name, value) {
  if (value === "" || value === null || value === undefined || value === false) delete shownSet()[name];
  else shownSet()[name] = value;
  saveSettings();
}

export const routeOf = (conversation) => (conversation.mode === "text" ? "/v1/completions" : "/v1/chat/completions");

// Throws a JsonFault for JSON that cannot be read.
export function makeBody(values, conversation, message) {
  const body = conversation.mode === "text" ? { prompt: message.content } : { messages: conversation.messagesTo(message, values.system) };
  if (connection.model) body.model = connection.model.model;
  for (const { name } of NUMBERS) if (values[name] !== undefined) body[name] = values[name];
  body.max_tokens ??= 512;
  body.seed = values.seed ?? randomSeed();
  if (values.stop) body.stop = values.stop.split("\n").filter(Boolean);
  if (values.speculation) body.speculation = "ngram";
  Object.assign(body, formatOf(values), conversation.mode === "chat" && values.tools ? { tools: parsed("tools", values.tools) } : {});
  return { ...body, ...(values.other ? parsed("other", values.other) : {}) };
}

// The settings that make such a body.
export function valuesOf(body) {
  const { messages, prompt, model, seed, stop, speculation, tools, response_format, ...rest } = body;
  const values = { system: messages?.find((each) => each.role === "system")?.content, stop: [stop ?? []].flat().join("\n"), speculation: Boolean(speculation) };
  const take = (name) => {
    const value = rest[name];
    delete rest[name];
    return value;
  };
  for (const { name } of NUMBERS) values[name] = take(name);
  for (const name of ["regex", "grammar"]) if (rest[name] !== undefined) Object.assign(values, { format: name, format_text: take(name) });
  if (rest.choice) Object.assign(values, { format: "choice", format_text: take("choice").join("\n") });
  if (response_format?.type && response_format.type !== "text") values.format = response_format.type;
  if (response_format?.json_schema) values.schema = JSON.stringify(response_format.json_schema.schema, null, 2);
  if (tools) values.tools = JSON.stringify(tools, null, 2);
  if (Object.keys(rest).length) values.other = JSON.stringify(rest, null, 2);
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined && value !== "" && value !== false));
}

function formatOf(values) {
  const text = values.format_text ?? "";
  switch (values.format) {
    case "json_object":
      return { response_format: { type: "json_object" } };
    case "json_schema":
      return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: parsed("schema", values.schema || "{}") } } };
    case "regex":
    case "grammar":
      return text ? { [values.format]: text } : {};
    case "choice":
      return text ? { choice: text.split("\n").filter(Boolean) } : {};
    default:
      return {};
  }
}

function parsed(name, text) {
  const editor = editors[name];
  if (editor && editor.text !== text) editor.text = text;
  return editor ? editor.value : JSON.parse(text);
}

// An error at the field that it is about, or else as a notice.
export function showFault(error, setName = settings.shown) {
  if (setName !== settings.shown && controls.size) {
    settings.shown = setName;
    renderSettings();
  }
  const param = error instanceof ApiError ? (error.param ?? "") : "";
  const field = Object.keys(JSON_FIELDS).find((name) => JSON_FIELDS[name] && param.startsWith(JSON_FIELDS[name]));
  const control = controls.get(param.split(/[.[]/)[0]) ?? (["regex", "grammar", "choice"].includes(param) ? controls.get("format_text") : null);
  if (error instanceof JsonFault) {
    const editor = Object.values(editors).find((each) => !each.fault.hidden);
    openPanel(editor?.area);
  } else if (field) {
    editors[field].showMessage(error.message);
    openPanel(editors[field].area);
  } else if (control) {
    control.setAttribute("aria-invalid", "true");
    control.title = error.message;
    const fault = h("p", { class: "fault", role: "alert" }, error.message);
    control.closest(".field").append(fault);
    control.addEventListener("input", () => {
      fault.remove();
      control.removeAttribute("aria-invalid");
    }, { once: true });
    openPanel(control);
  } else notify(error.message, "error");
}

function openPanel(control) {
  document.dispatchEvent(new CustomEvent("panel", { detail: "settings" }));
  control?.closest("details")?.setAttribute("open", "");
  control?.scrollIntoView({ block: "center" });
  control?.focus();
}

export function renderSettings() {
  controls.clear();
  const which = h("div", { class: "segmented", role: "group", "aria-label": "Settings" },
    ["a", "b"].map((name) => button(name === "a" ? "Settings A" : "Settings B", () => show(name), { "aria-pressed": String(settings.shown === name) })));
  $("settings").replaceChildren(
    h("label", { class: "check" }, checkbox("isCompared", settings, renderSettings), "Answer with two settings, side by side"),
    settings.isCompared ? which : "",
    presetRow(),
    h("fieldset", {}, h("legend", {}, "Sampling"), NUMBERS.map(numberField), seedField(), textField("stop", "Stop at", "a text a line, four at most", 2)),
    h("details", { open: Boolean(shownSet().format) }, h("summary", {}, "What the answer is held to"), formatFields()),
    h("details", { open: Boolean(shownSet().system || shownSet().tools) }, h("summary", {}, "System prompt and tools"),
      textField("system", "System prompt", "none", 4),
      jsonField("tools", "Tools, as OpenAI has them", '[{"type": "function", "function": {"name": "…", "parameters": {…}}}]')),
    h("details", { open: Boolean(shownSet().other || shownSet().speculation) }, h("summary", {}, "More"),
      h("label", { class: "check" }, checkbox("speculation", shownSet(), saveSettings), "Draft tokens from what stands before (same text, fewer steps)"),
      jsonField("other", "Further fields of the request", '{"logit_bias": {"42": -5}}')),
    viewFields());
}

function show(name) {
  settings.shown = name;
  saveSettings();
  renderSettings();
}

function checkbox(name, owner, changed) {
  return h("input", { type: "checkbox", checked: Boolean(owner[name]), onchange: (event) => {
    owner[name] = event.target.checked;
    saveSettings();
    changed();
  } });
}

function defaultOf(name) {
  const defaults = connection.model?.default_sampling?.[settings.mode === "text" ? "text" : "chat"] ?? {};
  return defaults[name];
}

function numberField({ name, label, min, max, step, off, hint }) {
  const standard = defaultOf(name) ?? off;
  const value = shownSet()[name];
  const number = h("input", { type: "number", id: `set-${name}`, min: String(min), max: String(max), step: "any", placeholder: String(standard) });
  const range = h("input", { type: "range", min: String(min), max: String(max), step: String(step), "aria-label": `${label}, slider` });
  number.value = value ?? "";
  range.value = value ?? standard;
  number.addEventListener("input", () => {
    set(name, number.value === "" ? "" : Number(number.value));
    range.value = number.value === "" ? standard : number.value;
  });
  range.addEventListener("input", () => {
    number.value = range.value;
    number.dispatchEvent(new Event("input"));
  });
  controls.set(name, number);
  return h("div", { class: "field number" }, h("label", { for: `set-${name}`, title: hint }, label), range, number);
}

function seedField() {
  const input = h("input", { type: "number", id: "set-seed", placeholder: "a new one for each answer" });
  input.value = shownSet().seed ?? "";
  input.addEventListener("input", () => set("seed", input.value === "" ? "" : Number(input.value)));
  controls.set("seed", input);
  return h("div", { class: "field" }, h("label", { for: "set-seed" }, "Seed"), input);
}

function textField(name, label, placeholder, rows) {
  const area = h("textarea", { id: `set-${name}`, rows, placeholder });
  area.value = shownSet()[name] ?? "";
  area.addEventListener("input", () => set(name, area.value));
  controls.set(name, area);
  return h("div", { class: "field" }, h("label", { for: `set-${name}` }, label), area);
}

function jsonField(name, label, placeholder) {
  const editor = (editors[name] = new JsonEditor(label, { placeholder, oninput: (text) => set(name, text) }));
  editor.text = shownSet()[name] ?? "";
  return editor.element;
}

function formatFields() {
  const format = shownSet().format ?? "";
  const select = h("select", { id: "set-format" }, FORMATS.map(([value, label]) => h("option", { value, selected: value === format }, label)));
  select.addEventListener("change", () => {
    set("format", select.value);
    renderSettings();
    $("set-format").closest("details").open = true;
    $("set-format").focus();
  });
  controls.set("response_format", select);
  const held = { json_schema: () => jsonField("schema", "Schema", '{"type": "object", "properties": {…}}') };
  for (const name of ["regex", "grammar", "choice"]) held[name] = () => textField("format_text", FORMATS.find(([value]) => value === name)[1], "", 5);
  return [h("div", { class: "field" }, h("label", { for: "set-format" }, "The answer is"), select), held[format]?.() ?? ""];
}

function presetRow() {
  const names = { ...BUILT_IN, ...presets };
  const select = h("select", { "aria-label": "Preset" }, h("option", { value: "" }, "Preset …"), Object.keys(names).map((name) => h("option", { value: name }, name)));
  select.addEventListener("change", () => {
    if (!(select.value in names)) return;
    settings[settings.shown] = structuredClone(names[select.value]);
    saveSettings();
    renderSettings();
  });
  const save = button("Save as …", () => {
    const name = prompt("Name of the preset")?.trim();
    if (!name) return;
    presets[name] = structuredClone(shownSet());
    if (!savePresets()) notify("This browser keeps nothing: the preset is lost when the page is closed", "error");
    renderSettings();
  }, { class: "plain" });
  const remove = button("Delete", () => {
    delete presets[select.value];
    savePresets();
    renderSettings();
  }, { class: "plain", title: "Delete the preset that is chosen" });
  return h("div", { class: "row" }, select, save, remove);
}

function viewFields() {
  const { view } = settings;
  const redraw = () => document.dispatchEvent(new Event("view"));
  const theme = h("select", { id: "set-theme" }, [["", "As the system"], ["light", "Light"], ["dark", "Dark"]].map(([value, label]) => h("option", { value, selected: view.theme === value }, label)));
  theme.addEventListener("change", () => {
    view.theme = theme.value;
    saveSettings();
    redraw();
  });
  return h("fieldset", {}, h("legend", {}, "View"),
    h("label", { class: "check" }, checkbox("isTinted", view, redraw), "Tint tokens by how likely they were"),
    h("label", { class: "check" }, checkbox("isRaw", view, redraw), "Tokens as written, without Markdown"),
    h("div", { class: "field" }, h("label", { for: "set-theme" }, "Colours"), theme));
}
