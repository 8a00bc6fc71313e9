// The parameters as the server declares them.

const found = await (await fetch(new URL("parameters.json", import.meta.url))).json();

export const NUMBERS = found.numbers; // {name, label, hint, min, max, step, off}
export const HEADINGS = { raw: "raw", allowed: "grammar", ...found.headings }; // of a trace's stages
export const SHARED = found.shared; // fields that /v1/trace and /v1/branch share with the completions
