// Shows a link's request before anything is computed.

import { $, button, grouped, h, on } from "./dom.js";
import { textOf } from "./permalink.js";
import { standardOf } from "./settings.js";

const [NUM_MESSAGES, NUM_CHARACTERS] = [8, 600];
const SHOWN_APART = ["messages", "prompt", "model", "tools", "max_tokens", "max_completion_tokens", "seed"];

// Resolves to true when the user chooses to have the link answered.
export function askFirst({ body, route }, model) {
	$("link-dialog")?.close();
	const dialog = h("dialog", { id: "link-dialog", "aria-labelledby": "link-title" },
		h("h2", { id: "link-title" }, "This link asks for an answer"),
		h("p.faint", "Nothing is computed before you choose “Answer it”. The settings hold for this conversation only."),
		h("dl", rowsOf(body, route, model).flatMap(([name, ...values]) => [h("dt", name), ...values.flat().map((value) => h("dd", value))])),
		h("div.row", button("Answer it", () => dialog.close("answer"), { class: "primary" }),
			button("Not now", () => dialog.close(), { autofocus: true })));
	document.body.append(dialog);
	dialog.showModal();
	return new Promise((resolve) => on(dialog, "close", () => {
		dialog.remove();
		resolve(dialog.returnValue === "answer");
	}));
}

function rowsOf(body, route, model) {
	const isChat = route === "/v1/chat/completions";
	const limit = body.max_completion_tokens ?? body.max_tokens;
	const settings = Object.entries(body).filter(([name, value]) =>
		!SHOWN_APART.includes(name) && value !== null && JSON.stringify(value) !== JSON.stringify(standardOf(name, isChat ? "chat" : "text")));
	const all = isChat ? body.messages : [];
	const messages = all.slice(-NUM_MESSAGES).map((each) => `${each.role}: ${textOf(each)}${(each.tool_calls ?? []).map(callText).join("")}`);
	return [
		["Model", body.model === undefined || body.model === model ? model : `${short(body.model)}. This server answers with ${model}.`],
		...(isChat ? [["Messages", all.length > NUM_MESSAGES ? [`${all.length - NUM_MESSAGES} earlier messages`] : [], messages.map(short)]]
			: [["Text", short(body.prompt)]]),
		...(body.tools?.length ? [["Tools", short(body.tools.map((tool) => tool.function.name).join(", "))]] : []),
		["Longest answer", limit === undefined ? "as long as the server allows" : `${short(limit)} tokens`],
		...(settings.length ? [["Settings", settings.map(([name, value]) => `${short(name)}: ${short(value)}`)]] : []),
	];
}

const callText = ({ function: { name, arguments: text } }) => ` [call of ${name} with ${text}]`;

function short(value) {
	const text = typeof value === "string" ? value : JSON.stringify(value);
	return text.length > NUM_CHARACTERS ? `${text.slice(0, NUM_CHARACTERS)} … (${grouped(text.length)} characters)` : text;
}
