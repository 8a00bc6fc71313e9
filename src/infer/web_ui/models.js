// The models of a server of several: which one answers, and what each takes.

import { connection, get, watch } from "./api.js";
import { $, h } from "./dom.js";

const STATES = { loaded: "", loading: "loading", unloading: "being unloaded", failed: "failed" };

function label({ id, takes, status, memory_bytes: bytes }) {
	const state = STATES[status.value] ?? (bytes ? `not loaded, ${(bytes / 1e9).toFixed(1)} GB` : "not loaded");
	const told = [takes?.includes("generate") === false && `for ${takes.join(", ")}`, state].filter(Boolean).join("; ");
	return told ? `${id} (${told})` : id;
}

async function refresh() {
	const { data } = await get("/v1/models");
	const choice = $("model-choice");
	const areSeveral = data.length > 1 && data.every((model) => model.status);
	choice.hidden = !areSeveral;
	$("model").hidden = areSeveral;
	if (!areSeveral) return;
	const shown = connection.model?.model ?? connection.chosen;
	choice.replaceChildren(...data.map((model) => h("option", {
		value: model.id, selected: model.id === shown, disabled: model.takes?.includes("generate") === false, title: model.status.error,
	}, label(model))));
}

const tryRefresh = () => refresh().catch(() => {}); // the page says by itself that the server is lost

export function initModels() {
	const choice = $("model-choice");
	choice.addEventListener("change", () => {
		connection.chosen = choice.value;
		watch();
	});
	choice.addEventListener("pointerdown", tryRefresh);
	choice.addEventListener("focus", tryRefresh);
	connection.addEventListener("change", () => connection.state === "ready" && tryRefresh());
}
