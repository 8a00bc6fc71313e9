// The settings: the form, its presets, and the request body that they make.

import { randomSeed } from "./answer.js";
import { ApiError, connection } from "./api.js";
import { $, button, h, notify, on } from "./dom.js";
import { JsonEditor, JsonFault } from "./json.js";
import { NUMBERS } from "./parameters.js";
import { isSystem, textOf } from "./permalink.js";
import { BUILT_IN, presets, savePresets, saveSettings, settings } from "./state.js";

const FORMATS = [["", "Any text"], ["json_object", "A JSON object"], ["json_schema", "JSON by a schema"], ["regex", "A regular expression"],
	["grammar", "A grammar (Lark)"], ["choice", "One of these lines"]];
const JSON_FIELDS = { schema: "response_format.json_schema.schema", tools: "tools", other: "" };

const controls = new Map(); // field → element
const editors = {};

let open = null; // conversation; one from a link has its own settings
const shownSet = () => open?.settings ?? settings[settings.shown];

export function showSettingsOf(conversation) {
	open = conversation;
	renderSettings();
}

// The sets of settings that answer a message: two if they are compared.
export const setsOf = (conversation) =>
	conversation.settings ? [["a", conversation.settings]] : (settings.isCompared ? ["a", "b"] : [settings.shown]).map((name) => [name, settings[name]]);

function replaceSet(values) {
	if (open?.settings) open.settings = values;
	else settings[settings.shown] = values;
	saveSettings();
	renderSettings();
}

function set(name, value) {
	if (value === "" || value === null || value === undefined || value === false) delete shownSet()[name];
	else shownSet()[name] = value;
	saveSettings();
}

export const routeOf = (conversation) => (conversation.mode === "text" ? "/v1/completions" : "/v1/chat/completions");

// Throws a JsonFault if a field has invalid JSON.
export function makeBody(values, conversation, message) {
	const body = conversation.mode === "text" ? { prompt: message.content } : { messages: conversation.messagesTo(message, values.system) };
	if (connection.model) body.model = connection.model.model;
	for (const { name } of NUMBERS) if (values[name] !== undefined) body[name] = values[name];
	body.max_tokens ??= NUMBERS.find((each) => each.name === "max_tokens").off;
	body.seed = values.seed ?? randomSeed();
	if (values.stop) body.stop = values.stop.split("\n").filter(Boolean);
	if (values.speculation) body.speculation = "ngram";
	Object.assign(body, formatOf(values), conversation.mode === "chat" && values.tools ? { tools: parsed("tools", values.tools) } : {});
	return { ...body, ...(values.other ? parsed("other", values.other) : {}) };
}

// Returns the settings that make such a body.
export function valuesOf(body) {
	const { messages, prompt, model, seed, stop, speculation, tools, response_format, ...rest } = body;
	const values = { system: messages?.filter(isSystem).map(textOf).join("\n\n"), stop: [stop ?? []].flat().join("\n"), speculation: Boolean(speculation) };
	const take = (name) => {
		const value = rest[name];
		delete rest[name];
		return value;
	};
	for (const { name } of NUMBERS) values[name] = take(name);
	for (const name of ["regex", "grammar"]) if (rest[name] !== undefined) Object.assign(values, { format: name, format_text: take(name) });
	if (rest.choice) Object.assign(values, { format: "choice", format_text: [take("choice")].flat().join("\n") });
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
			return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: parsed("schema", values.schema || "{}"), strict: true } } };
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

// Shows an error at its field, or as a notice.
export function showFault(error, setName = settings.shown) {
	if (!open?.settings && setName !== settings.shown && controls.size) {
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
		const fault = h("p.fault", { role: "alert" }, error.message);
		control.closest(".field").append(fault);
		on(control, "input", () => {
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
	const which = h("div.segmented", { role: "group", "aria-label": "Settings" },
		["a", "b"].map((name) => button(name === "a" ? "Settings A" : "Settings B", () => show(name), { "aria-pressed": String(settings.shown === name) })));
	$("settings").replaceChildren(
		...(open?.settings ? [h("p.remark", "These settings came with the link. They hold for this conversation only."),
			button("Use my own settings", () => {
				open.settings = null;
				renderSettings();
			})]
			: [h("label.check", checkbox("isCompared", settings, renderSettings), "Compare two settings side by side"), settings.isCompared ? which : ""]),
		presetRow(),
		h("fieldset", h("legend", "Sampling"), NUMBERS.map(numberField), seedField(), textField("stop", "Stop at", "one text per line", 2)),
		h("details", { open: Boolean(shownSet().format) }, h("summary", "Output format"), formatFields()),
		h("details", { open: Boolean(shownSet().tools) }, h("summary", "Tools"),
			jsonField("tools", "Tools in OpenAI's format", '[{"type": "function", "function": {"name": "…", "parameters": {…}}}]')),
		h("details", { open: Boolean(shownSet().other || shownSet().speculation) }, h("summary", "More"),
			h("label.check", checkbox("speculation", shownSet(), saveSettings), "Draft tokens from the earlier text (same answer, fewer steps)"),
			jsonField("other", "Other fields of the request", '{"logit_bias": {"42": -5}}')),
		viewFields());
	$("system").hidden = open?.mode === "text";
	$("system-text").value = shownSet().system ?? "";
	showSystem();
}

function showSystem() {
	const suffix = settings.isCompared && !open?.settings ? ` of settings ${settings.shown.toUpperCase()}` : "";
	$("system").querySelector("summary").replaceChildren(`System prompt${suffix}: `, h("span", shownSet().system || "not set"));
}

on($("system-text"), "input", ({ target }) => {
	set("system", target.value);
	showSystem();
});

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

// Returns the value that holds if a request does not set it.
export function standardOf(name, mode) {
	const defaults = connection.model?.default_sampling?.[mode] ?? {};
	return defaults[name] ?? NUMBERS.find((each) => each.name === name)?.off;
}

function numberField({ name, label, min, max, step, hint }) {
	const standard = standardOf(name, open?.mode ?? "chat");
	const value = shownSet()[name];
	const number = h("input", { type: "number", id: `set-${name}`, min: String(min), max: String(max), step: "any", placeholder: String(standard) });
	const range = h("input", { type: "range", min: String(min), max: String(max), step: String(step), "aria-label": `${label}, slider` });
	number.value = value ?? "";
	range.value = value ?? standard;
	on(number, "input", () => {
		set(name, number.value === "" ? "" : Number(number.value));
		range.value = number.value === "" ? standard : number.value;
	});
	on(range, "input", () => {
		number.value = range.value;
		number.dispatchEvent(new Event("input"));
	});
	controls.set(name, number);
	return h("div.field.number", h("label", { for: `set-${name}`, title: hint }, label), range, number);
}

function seedField() {
	const input = h("input", { type: "number", id: "set-seed", placeholder: "a new one for each answer" });
	input.value = shownSet().seed ?? "";
	on(input, "input", () => set("seed", input.value === "" ? "" : Number(input.value)));
	controls.set("seed", input);
	return h("div.field", h("label", { for: "set-seed" }, "Seed"), input);
}

function textField(name, label, placeholder, rows) {
	const area = h("textarea", { id: `set-${name}`, rows, placeholder });
	area.value = shownSet()[name] ?? "";
	on(area, "input", () => set(name, area.value));
	controls.set(name, area);
	return h("div.field", h("label", { for: `set-${name}` }, label), area);
}

function jsonField(name, label, placeholder) {
	const editor = (editors[name] = new JsonEditor(label, { placeholder, oninput: (text) => set(name, text) }));
	editor.text = shownSet()[name] ?? "";
	return editor.element;
}

function formatFields() {
	const format = shownSet().format ?? "";
	const select = h("select", { id: "set-format" }, FORMATS.map(([value, label]) => h("option", { value, selected: value === format }, label)));
	on(select, "change", () => {
		set("format", select.value);
		renderSettings();
		$("set-format").closest("details").open = true;
		$("set-format").focus();
	});
	controls.set("response_format", select);
	const held = { json_schema: () => jsonField("schema", "Schema", '{"type": "object", "properties": {…}}') };
	for (const name of ["regex", "grammar", "choice"]) held[name] = () => textField("format_text", FORMATS.find(([value]) => value === name)[1], "", 5);
	return [h("div.field", h("label", { for: "set-format" }, "The answer is"), select), held[format]?.() ?? ""];
}

function presetRow() {
	const names = { ...BUILT_IN, ...presets };
	const select = h("select", { "aria-label": "Preset" }, h("option", { value: "" }, "Preset …"), Object.keys(names).map((name) => h("option", { value: name }, name)));
	on(select, "change", () => {
		if (!(select.value in names)) return;
		replaceSet(structuredClone(names[select.value]));
	});
	const save = button("Save as …", () => {
		const name = prompt("Name of the preset")?.trim();
		if (!name) return;
		presets[name] = structuredClone(shownSet());
		if (!savePresets()) notify("This browser stores nothing. The preset is lost when you close the page.", "error");
		renderSettings();
	});
	const remove = button("Delete", () => {
		delete presets[select.value];
		savePresets();
		renderSettings();
	}, { title: "Delete the chosen preset" });
	return h("div.row", select, save, remove);
}

function viewFields() {
	const { view } = settings;
	const redraw = () => document.dispatchEvent(new Event("view"));
	const theme = h("select", { id: "set-theme" }, [["", "Same as the system"], ["light", "Light"], ["dark", "Dark"]].map(([value, label]) => h("option", { value, selected: view.theme === value }, label)));
	on(theme, "change", () => {
		view.theme = theme.value;
		saveSettings();
		redraw();
	});
	return h("fieldset", h("legend", "View"),
		h("label.check", checkbox("isTinted", view, redraw), "Tint tokens by how likely they were"),
		h("label.check", checkbox("isRaw", view, redraw), "Tokens as written, without Markdown"),
		h("div.field", h("label", { for: "set-theme" }, "Colours"), theme));
}
