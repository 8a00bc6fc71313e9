// The sampler's noise, bit for bit as in `compute/sampling/noise.py`, and its choices with other settings.

const f = Math.fround;
const MASK = (1n << 64n) - 1n;
const LOG = [7.0376836292e-2, -1.151461031e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
	2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1].map(f);
const [LN2_HIGH, LN2_LOW, ONE, SQRT_HALF] = [f(0.693359375), f(-2.1219444e-4), 0x3f800000, 0x3f3504f3];
const MOST = 22.88;
const floats = new Float32Array(1);
const ints = new Int32Array(floats.buffer);

function mix64(x) {
	x = (x + 0x9e3779b97f4a7c15n) & MASK;
	x = ((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
	x = ((x ^ (x >> 27n)) * 0x94d049bb133111ebn) & MASK;
	return x ^ (x >> 31n);
}

function mix32(x) {
	x = Math.imul(x ^ (x >>> 16), 0x7feb352d);
	x = Math.imul(x ^ (x >>> 15), 0x846ca68b);
	return x ^ (x >>> 16);
}

function split(x) {
	floats[0] = x;
	const bits = (ints[0] + ONE - SQRT_HALF) | 0;
	ints[0] = (bits & 0x7fffff) + SQRT_HALF;
	return [(bits >> 23) - 127, f(floats[0] - 1)];
}

function log(exponent, fraction) {
	let sum = f(f(fraction * LOG[0]) + LOG[1]);
	for (let i = 2; i < LOG.length; i++) sum = f(f(sum * fraction) + LOG[i]);
	const square = f(fraction * fraction);
	const tail = f(f(f(f(sum * fraction) * square) + f(exponent * LN2_LOW)) - f(square * 0.5));
	return f(f(fraction + tail) + f(exponent * LN2_HIGH));
}

function gumbelOf(hash) {
	const minusV = f(f(f(hash >>> 0) + 0.5) * -(2 ** -32));
	let [exponent, fraction] = split(f(f(f(~hash >>> 0) + 0.5) * 2 ** -32));
	if (exponent === 0) fraction = minusV;
	return -log(...split(-log(exponent, fraction)));
}

// Noise at one position: `at(id)` of a token, `most(known, size)` the largest of all other tokens.
export class Noise {
	constructor(seed, position) {
		const key = mix64((mix64(BigInt(seed) & MASK) + BigInt(position)) & MASK);
		this.low = Number(key & 0xffffffffn) | 0;
		this.high = Number(key >> 32n) | 0;
	}

	hash(id) {
		return mix32((mix32(id ^ this.low) + this.high) | 0);
	}

	at(id) {
		return gumbelOf(this.hash(id));
	}

	most(known, size) {
		let least = 2 ** 32;
		for (let id = 0; id < size; id++) {
			const hash = this.hash(id) >>> 0;
			if (hash < least && !known.has(id)) least = hash;
		}
		return least === 2 ** 32 ? -Infinity : gumbelOf(least | 0);
	}
}

const EDITS = /^(raw|allowed|logit_bias|min_new_tokens|\w+_penalty)$/; // the trace has their results
export const FILTERS = ["temperature", "top_k", "top_p", "min_p", "temperature_last"];

export function settingsOf({ stages, seed }) {
	const value = (name) => stages.find((stage) => stage.name === name)?.value;
	const temperature = value("temperature") ?? value("temperature_last") ?? (seed === null ? 0 : 1);
	return { temperature, top_k: value("top_k") ?? 0, top_p: value("top_p") ?? 1, min_p: value("min_p") ?? 0, seed };
}

// Returns the candidate that other settings would choose, or null if only the server knows.
export function chosenWith(trace, { temperature, top_k, top_p, min_p, seed }, vocabSize) {
	if (trace.stages.some(({ name }) => !EDITS.test(name) && !FILTERS.includes(name))) return null;
	const filter = trace.stages.findIndex((stage) => FILTERS.includes(stage.name));
	const base = filter < 0 ? trace.stages.length - 1 : filter - 1;
	const most = Math.min(...trace.candidates.filter((each) => each.rank <= trace.candidates.length).map((each) => each.logits[0]));
	const sure = trace.candidates.map(({ token_id, text, logits, probabilities }) => ({ token_id, text, logit: logits[base], share: probabilities[base] }))
		.filter((each) => each.logit !== null && each.logit >= most) // unknown tokens are at most `most`
		.sort((a, b) => b.logit - a.logit || a.token_id - b.token_id);
	if (!sure.length) return null;
	if (temperature === 0) return sure[0];
	const divisor = trace.stages.some((stage) => stage.name === "temperature_last") ? 1 : temperature;
	const numOthers = trace.stages[base].num_kept - sure.length;
	const kept = top_k > 0 ? sure.slice(0, top_k) : sure;
	const hasOthers = numOthers > 0 && !(top_k > 0 && top_k <= sure.length);
	const rest = Math.max(1 - sure.reduce((sum, each) => sum + each.share, 0), 0);
	const bounds = hasOthers ? others(sure[0], rest, numOthers, Math.exp(most - sure[0].logit), divisor) : [0, 0];
	const options = top_p < 1 ? nucleus(kept, bounds, top_p, divisor) : [null];
	const found = options.map((count) => pick(count === null ? kept : kept.slice(0, count), hasOthers && count === null));
	return found.every((each) => each === found[0]) ? found[0] : null;

	function pick(left, mayMore) {
		const lowest = min_p > 0 ? left[0].logit / divisor + Math.log(min_p) : -Infinity;
		const running = left.filter((each) => each.logit / divisor >= lowest);
		const noise = new Noise(seed, trace.position);
		const scores = running.map((each) => each.logit / temperature + noise.at(each.token_id));
		const best = Math.max(...scores);
		if (mayMore && most / divisor >= lowest && most / temperature + MOST > best) {
			const ids = new Set(sure.map((each) => each.token_id));
			if (most / temperature + noise.most(ids, vocabSize) > best) return null;
		}
		return running[scores.indexOf(best)];
	}
}

// Returns bounds of the unknown tokens' weight, relative to the first token.
function others(first, share, count, most, divisor) {
	const power = 1 / divisor;
	const sum = share / first.share;
	const bounds = [count * (sum / count) ** power, sum * most ** (power - 1)];
	return power >= 1 ? bounds : bounds.reverse();
}

// Returns the number of kept tokens for each bound; null if more than are known.
function nucleus(kept, bounds, top_p, divisor) {
	const weights = kept.map((each) => Math.exp((each.logit - kept[0].logit) / divisor));
	const total = weights.reduce((sum, weight) => sum + weight, 0);
	return bounds.map((rest) => {
		let sum = 0;
		for (let i = 0; i < weights.length; i++) if ((sum += weights[i]) >= top_p * (total + rest)) return i + 1;
		return rest > 0 ? null : weights.length;
	});
}
