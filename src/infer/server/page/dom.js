// Elements made of values: text only ever becomes a text node.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.flat().filter((child) => child !== null));
  return element;
}

export function button(label, onclick, properties = {}) {
  return h("button", { type: "button", onclick, ...properties }, label);
}

// Calls `draw` once in the next frame, however often it is asked; after a slow one, only when four times that has passed.
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
  const notice = h("div", { class: `notice ${kind}`, role: kind === "error" ? "alert" : "status" }, h("span", {}, text));
  notice.append(...actions, button("×", () => notice.remove(), { "aria-label": "Close this notice", class: "plain" }));
  $("notices").append(notice);
  if (kind === "info") setTimeout(() => notice.remove(), 8000);
  return notice;
}

export const percent = (share) =>
  share === 0 ? "0 %" : share < 0.0005 ? "<0.1 %" : `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

// A token's text so that spaces and control characters are seen.
export function shown(text) {
  const visible = text.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥");
  return visible === "" ? "∅" : visible;
}

export function download(name, value) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], { type: "application/json" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
