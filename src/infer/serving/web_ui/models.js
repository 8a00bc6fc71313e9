// The models of a server of several: which one answers, what each takes, and the download of others.

import { connection, get, watch } from "./api.js";
import { $, h } from "./dom.js";
import { initPull, openPull } from "./pull.js";

const PULL = "\n"; // no model has this name
const LOOK = 1100;
const STATES = { loaded: "", loading: "loading", unloading: "being unloaded", failed: "failed" };

function label({ id, takes, status, memory_bytes: bytes }) {
	const state = STATES[status.value] ?? (bytes ? `not loaded, ${(bytes / 1e9).toFixed(1)} GB` : "not loaded");
	const told = [takes?.includes("generate") === false && `for ${takes.join(", ")}`, state].filter(Boolean).join("; ");
	return told ? `${id} (${told})` : id;
}

async function refresh() {
	const { data, allow_pull: allowPull } = await get("/v1/models");
	const choice = $("model-choice");
	const areSeveral = allowPull || (data.length > 1 && data.every((model) => model.status));
	choice.hidden = !areSeveral;
	$("model").hidden = areSeveral;
	if (!areSeveral) return;
	const shown = connection.model?.model ?? connection.chosen;
	const options = data.map((model) => h("option", {
		value: model.id, selected: model.id === shown, disabled: model.takes?.includes("generate") === false, title: model.status.error,
	}, label(model)));
	if (!data.length) options.push(h("option", { disabled: true, selected: true }, "no model"));
	if (allowPull) options.push(h("option", { value: PULL }, "Download a model…"));
	choice.replaceChildren(...options);
	return data.map((model) => model.id);
}

function choose(id) {
	connection.chosen = id;
	watch();
}

// Chooses the model that the server has since a download, and returns what to say of it.
async function pulled(name) {
	const known = new Set([...$("model-choice").options].map((option) => option.value));
	await new Promise((resolve) => setTimeout(resolve, LOOK)); // the server looks for new models once a second
	const found = (await refresh()).find((id) => !known.has(id));
	if (!found) return `${name} is downloaded. The server serves it with --load-on-demand.`;
	choose(found);
	return `${found} is downloaded, and is being loaded.`;
}

const tryRefresh = () => refresh().catch(() => {}); // the page says by itself that the server is lost

export function initModels() {
	const choice = $("model-choice");
	choice.addEventListener("change", () => {
		if (choice.value !== PULL) return choose(choice.value);
		openPull();
		tryRefresh();
	});
	initPull(pulled);
	choice.addEventListener("pointerdown", tryRefresh);
	choice.addEventListener("focus", tryRefresh);
	connection.addEventListener("change", () => connection.state === "ready" && tryRefresh());
}
