// The dialog that lets the server download a model of the hub.

import { isExpected, lines } from "./api.js";
import { $, announce, on } from "./dom.js";

const megabytes = (bytes) => (bytes / 1e6).toFixed(1);
let running = null; // the controller of the download

function show(text, share = null, isFault = false) {
	$("pull-state").textContent = text;
	$("pull-state").classList.toggle("fault", isFault);
	$("pull-share").hidden = share === null;
	$("pull-share").value = share ?? 0;
	$("pull-start").disabled = $("pull-name").disabled = running !== null;
	$("pull-stop").hidden = running === null;
}

function showProgress({ total, completed }, began) {
	const seconds = (performance.now() - began.at) / 1000;
	const rate = seconds > 0.5 ? `, ${megabytes((completed - began.completed) / seconds)} MB/s` : "";
	show(`${megabytes(completed)} of ${megabytes(total)} MB${rate}`, completed / total);
}

async function pull(name) {
	let began = null;
	for await (const line of lines("/api/pull", { model: name }, running.signal)) {
		if (!line.total) continue;
		began ??= { at: performance.now(), completed: line.completed }; // a resumed one has bytes already
		showProgress(line, began);
	}
}

async function start(pulled) {
	const name = $("pull-name").value.trim();
	if (!name || running) return;
	running = new AbortController();
	show("The server looks for the files.");
	let told, isFault = false;
	try {
		await pull(name);
		told = await pulled(name);
	} catch (error) {
		isFault = error.name !== "AbortError";
		if (isFault && !isExpected(error)) throw error;
		told = isFault ? error.message : "Stopped. The next download of this model resumes it.";
	} finally {
		running = null;
	}
	show(told, null, isFault);
	announce(told);
}

export const openPull = () => $("pull-dialog").showModal();

// `pulled` returns what to say of a model that was downloaded.
export function initPull(pulled) {
	on($("pull-form"), "submit", (event) => {
		if (event.submitter?.value === "close") return;
		event.preventDefault();
		start(pulled);
	});
	on($("pull-stop"), "click", () => running?.abort());
}
