// One token: the stages of sampling that chose it, and its candidates, which can begin branches.

import { isExpected } from "./api.js";
import { $, button, grouped, h, percent, plainButton, shown, svg } from "./dom.js";
import { HEADINGS } from "./parameters.js";

const ORIGINS = { sampled: "sampled", draft: "drafted: guessed from the earlier text and confirmed", forced: "forced: the grammar allows no other",
	given: "given: part of the branch's beginning" };
const [LEFT, WIDTH, BAR, GAP] = [124, 226, 18, 26];
const AHEAD = 6; // tokens traced in one request

let current = { answer: null, index: -1, isPinned: false };
let timer = 0;
let branch = () => {};

export function initFunnel(onBranch) {
	branch = onBranch;
}

export const chosenToken = () => current;

export function chooseToken(answer, index, isPinned) {
	if (current.isPinned && !isPinned) return;
	const isAgain = isPinned && current.isPinned && current.answer === answer && current.index === index;
	mark(null);
	current = { answer, index, isPinned: isPinned && !isAgain };
	mark("chosen-token");
	draw();
	clearTimeout(timer);
	if (!answer.traces.has(index) && (isPinned || !answer.isRunning)) timer = setTimeout(() => load(answer, index), isPinned ? 0 : 100);
}

export function releaseToken() {
	mark(null);
	current.isPinned = false;
}

function mark(name) {
	for (const span of document.querySelectorAll(".chosen-token")) span.classList.remove("chosen-token");
	if (!name || !current.answer) return;
	const spans = document.querySelectorAll(`.answer[data-id="${current.answer.id}"] [data-i="${current.index}"]`);
	for (const span of spans) span.classList.add(name);
}

async function load(answer, index) {
	try {
		await answer.trace(index, AHEAD);
	} catch (error) {
		if (!isExpected(error)) throw error;
		answer.traces.set(index, { fault: error.message, numCandidates: 0 });
		setTimeout(() => answer.traces.delete(index), 3000);
	}
	if (current.answer === answer && current.index === index) draw();
}

function draw() {
	const { answer, index } = current;
	const token = answer.tokens[index];
	const trace = answer.traces.get(index);
	if (!token) return;
	$("token").replaceChildren(
		h("h2.token-text", shown(answer.tokenText.of(index))),
		h("p.facts", `token ${token.id} · number ${index + 1} of the answer · ${ORIGINS[token.origin]}`),
		...(trace?.stages ? traced(answer, index, token, trace) : [known(token), h("p.faint", trace?.fault ?? (answer.isRunning ? "Click it to see how it was chosen." : "…"))]));
}

// Shows the likeliest tokens until the trace arrives.
function known({ logprob, top }) {
	if (logprob === null) return "";
	return h("table.candidates", h("caption", `Likelihood ${percent(Math.exp(logprob))}`),
		h("tbody", (top ?? []).map(([text, each]) => h("tr", h("td.name", shown(text)), h("td", percent(Math.exp(each)))))));
}

function traced(answer, index, token, trace) {
	const chosen = trace.candidates.find((each) => each.token_id === trace.token_id);
	const isOther = trace.token_id !== token.id;
	return [
		isOther ? h("p.remark", `The sampler would have chosen ${shown(chosen.text)} here.`) : "",
		picture(trace),
		h("p.faint", sentence(trace, chosen)),
		candidates(answer, index, token, trace),
		plainButton("More candidates", async (event) => {
			event.target.disabled = true;
			await answer.trace(index, 1, 40);
			draw();
		}, { hidden: trace.candidates.length >= 40 }),
	];
}

function sentence({ stages, seed }, chosen) {
	const left = stages.at(-1).num_kept;
	if (seed === null) return `The temperature is 0, so the largest of ${grouped(left)} logits was chosen.`;
	if (left === 1) return "Only one candidate was left.";
	return `${grouped(left)} candidates were left. Noise from seed ${seed} was added to each. The largest sum won: ${chosen.score.toFixed(2)}.`;
}

// Draws a bar per stage and a band per candidate. Grey flows show the removed probability.
export function picture({ stages, candidates: all, token_id }) {
	const bands = all.map((each, index) => ({
		name: `${shown(each.text)}`, class: each.token_id === token_id ? "band chosen" : "band",
		opacity: each.token_id === token_id ? 1 : Math.max(0.3, 0.95 - (0.65 * index) / all.length), shares: each.probabilities, droppedBy: each.dropped_by,
	}));
	bands.push({ name: "all others", class: "band others", opacity: 1, shares: stages.map((stage) => stage.others), droppedBy: null });
	const height = stages.length * (BAR + GAP) - GAP + 2;
	const root = svg("svg", { viewBox: `0 0 ${LEFT + WIDTH + 2} ${height}`, class: "funnel", role: "img" },
		svg("title", `The stages: ${stages.map(described).join("; ")}`));
	stages.forEach((stage, i) => {
		const y = i * (BAR + GAP);
		const spans = spansOf(bands, i);
		if (i) root.append(...flows(bands, stages, i, spansOf(bands, i - 1), spans, y));
		spans.forEach(([start, end], b) => {
			if (end - start < 0.2) return;
			const line = end - start > 3 ? 1 : 0;
			root.append(svg("rect", { x: start, y, width: end - start - line, height: BAR, class: bands[b].class, opacity: bands[b].opacity },
				svg("title", `${bands[b].name} ${percent(bands[b].shares[i])}`)));
			if (end - start > 26) {
				const fits = Math.floor((end - start - 6) / 6.2);
				const name = bands[b].name.length > fits ? `${bands[b].name.slice(0, Math.max(fits - 1, 1))}…` : bands[b].name;
				root.append(svg("text", { x: start + 4, y: y + 13, class: `in-band ${bands[b].class.includes("others") ? "dark" : ""}` }, name));
			}
		});
		const value = stage.value === null ? "" : svg("tspan.value", ` ${+stage.value.toFixed(3)}`);
		root.append(svg("text.stage", { x: 0, y: y + 8 }, HEADINGS[stage.name] ?? stage.name, value),
			svg("text.left", { x: 0, y: y + 20 }, `${grouped(stage.num_kept)} left`));
		const note = stage.removed > 0 ? `−${percent(stage.removed)}`.replace("−<", "<") : stage.moved >= 0.0005 ? `moved ${percent(stage.moved)}` : "";
		if (note && i) root.append(svg("text.removed", { x: LEFT + WIDTH, y: y - 6 }, note));
	});
	return root;
}

const described = ({ name, value, num_kept, removed }) =>
	`${HEADINGS[name] ?? name}${value === null ? "" : ` ${value}`}, ${num_kept} left${removed > 0 ? `, ${percent(removed)} removed` : ""}`;

function spansOf(bands, stage) {
	let x = LEFT;
	return bands.map(({ shares }) => [x, (x += WIDTH * shares[stage])]);
}

function flows(bands, stages, i, before, after, y) {
	const [top, bottom] = [y - GAP, y];
	const middle = y - GAP / 2;
	const named = bands.slice(0, -1).reduce((sum, band) => sum + (band.droppedBy === stages[i].name ? band.shares[i - 1] : 0), 0);
	return bands.flatMap((band, b) => {
		const dropped = b === bands.length - 1 ? Math.max(0, stages[i].removed - named) : band.droppedBy === stages[i].name ? band.shares[i - 1] : 0;
		const cut = before[b][1] - WIDTH * dropped;
		const found = [];
		if (after[b][1] - after[b][0] > 0.1 && cut > before[b][0]) {
			const [x0, x1, x2, x3] = [before[b][0], cut, after[b][1], after[b][0]];
			const d = `M${x0} ${top + 0}L${x1} ${top}C${x1} ${middle} ${x2} ${middle} ${x2} ${bottom}L${x3} ${bottom}C${x3} ${middle} ${x0} ${middle} ${x0} ${top}Z`;
			found.push(svg("path", { d, class: `${band.class} flow`, opacity: 0.3 * band.opacity }));
		}
		if (dropped * WIDTH > 0.3) {
			const [x1, x2] = [cut, before[b][1]];
			found.push(svg("path", { d: `M${x1} ${top}H${x2}L${(x1 + x2) / 2 + (x2 - x1) / 5} ${top + 13}H${(x1 + x2) / 2 - (x2 - x1) / 5}Z`, class: "drain" }));
		}
		return found;
	});
}

function candidates(answer, index, token, trace) {
	const running = trace.candidates.filter((each) => each.score !== null);
	const values = running.flatMap((each) => [each.logits.at(-1), each.score]);
	const [low, high] = [Math.min(...values), Math.max(...values)];
	const place = (value) => 3 + (62 * (value - low)) / Math.max(high - low, 1e-9);
	const rows = trace.candidates.map((each) => {
		const isChosen = each.token_id === trace.token_id;
		const isHere = each.token_id === token.id;
		const race = each.score === null ? h("span.faint", HEADINGS[each.dropped_by] ?? each.dropped_by)
			: svg("svg", { viewBox: "0 0 68 14", class: `race ${isChosen ? "chosen" : ""}`, role: "img" },
					svg("title", `logit ${each.logits.at(-1).toFixed(2)}${each.noise === null ? "" : `, noise ${each.noise.toFixed(2)}, sum ${each.score.toFixed(2)}`}`),
					svg("line", { x1: place(each.logits.at(-1)), x2: place(each.score), y1: 7, y2: 7 }),
					svg("circle.from", { cx: place(each.logits.at(-1)), cy: 7, r: 2 }), svg("circle", { cx: place(each.score), cy: 7, r: 3 }));
		const name = h("span.name", shown(each.text));
		const isForbidden = each.dropped_by === "allowed" && !answer.body.allowed_token_ids; // cannot begin a branch
		const act = isHere ? h("span.faint", "here") : isForbidden ? ""
			: button("Branch", () => branch(answer, index, { id: each.token_id }), { class: "plain branch", "aria-label": `Branch with ${shown(each.text)}` });
		return h("tr", { class: `${isChosen ? "chosen" : ""} ${each.dropped_by ? "dropped" : ""}` },
			h("td.rank", String(each.rank)), h("th", { scope: "row" }, name), h("td", percent(each.probabilities[0])),
			h("td", each.dropped_by ? "–" : percent(each.probabilities.at(-1))), h("td", race), h("td", act));
	});
	const heads = ["", "Candidate", "raw", "left", "noise", ""].map((text) => h("th", { scope: "col" }, text || h("span.hidden", "rank or action")));
	return h("table.candidates", h("caption.hidden", "Candidates. Each alternative can begin a branch."), h("thead", h("tr", heads)), h("tbody", rows));
}
