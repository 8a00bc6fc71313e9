// Makes elements. Text only becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

const isProperties = (value) => value?.constructor === Object;

// Makes an element of "tag.class.class", its properties if there are any, and its children.
export function h(name, ...rest) {
	const properties = isProperties(rest[0]) ? rest.shift() : {};
	const [tag, ...classes] = name.split(".");
	const element = document.createElement(tag);
	if (classes.length) element.className = classes.join(" ");
	for (const [name, value] of Object.entries(properties)) {
		if (value === undefined || value === null || value === false) continue;
		if (name === "class") element.className = value;
		else if (name === "data") Object.assign(element.dataset, value);
		else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
		else if (name in element && typeof value !== "string") element[name] = value;
		else element.setAttribute(name, value === true ? "" : value);
	}
	element.append(...rest.flat().filter((child) => child !== null && child !== undefined && child !== false));
	return element;
}

export function svg(name, ...rest) {
	const attributes = isProperties(rest[0]) ? rest.shift() : {};
	const [tag, ...classes] = name.split(".");
	const element = document.createElementNS(SVG, tag);
	if (classes.length) element.setAttribute("class", classes.join(" "));
	for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
	element.append(...rest.flat());
	return element;
}

export function button(label, onclick, properties = {}) {
	return h("button", { type: "button", onclick, ...properties }, label);
}

export const on = (target, type, listener, options) => target.addEventListener(type, listener, options);
export const grouped = (number) => number.toLocaleString("en");
export const plainButton = (label, onclick, properties) => button(label, onclick, { class: "plain", ...properties });

// Calls `draw` at most once per frame. After a slow frame it pauses for four times as long.
export function perFrame(draw) {
	let isAsked = false;
	let notBefore = 0;
	const run = () => {
		const began = performance.now();
		if (began < notBefore) return void setTimeout(() => requestAnimationFrame(run), notBefore - began);
		isAsked = false;
		draw();
		const took = performance.now() - began;
		notBefore = took > 8 ? performance.now() + 4 * took : 0;
	};
	return () => {
		if (isAsked) return;
		isAsked = true;
		requestAnimationFrame(run);
	};
}

export function announce(text) {
	$("live").textContent = text;
}

export function notify(text, kind = "info", ...actions) {
	const notice = h("div", { class: `notice ${kind}`, role: kind === "error" ? "alert" : "status" }, h("span", text));
	notice.append(...actions, button("×", () => notice.remove(), { "aria-label": "Close this notice", class: "plain" }));
	$("notices").append(notice);
	if (kind === "info") setTimeout(() => notice.remove(), 8000);
	return notice;
}

export const percent = (share) =>
	share === 0 ? "0 %" : share < 0.0005 ? "<0.1 %" : `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

// Makes spaces and control characters of a token visible.
export function shown(text) {
	const visible = text.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥");
	return visible === "" ? "∅" : visible;
}

export function download(name, value) {
	const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], { type: "application/json" }));
	h("a", { href: url, download: name }).click();
	setTimeout(() => URL.revokeObjectURL(url), 10000);
}
